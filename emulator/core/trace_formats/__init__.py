"""Trace files as text -> columns of times and lengths, one declared form a published format.

Formats differ in their columns and in how they write time, and a row read wrongly changes a verdict without anything
failing. So columns and keys are found by name, and whatever cannot be read exactly is refused with the file, the line
and what would be right.

`forms` declares the formats, `detection` tells which one a text has, `table` and `lines` read CSV and JSON lines,
`values` times and token counts.
"""

"""Decisions without I/O: the same state machines run live and in virtual time."""

"""A load test in a terminal: what became of the requests, latencies from the send and from the schedule, fidelity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emulator.core.bench.measures import LATENCIES
from emulator.core.bench.result import ANCHORED, FROM_SCHEDULE

NOTHING = "-"
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
Document = Mapping[str, Any]


def render(document: Document) -> RenderableType:
    """What a terminal shows of the document of `core.bench.result`."""
    parts: list[RenderableType] = [*(Text(line) for line in _requests(document)), ""]
    parts += [_latencies(document), "", _throughput(document)]
    notes = [Text(note, style="yellow") for note in _notes(document)]
    return Group(*parts, *([""] if notes else []), *notes, "", *_fidelity(document))


def _requests(document: Document) -> list[str]:
    parts = [f"{document['completed']:,} of {document['requests']:,} requests completed"]
    if document["failed"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in document["failed_by_reason"].items())
        parts.append(f"{document['failed']:,} failed ({reasons})")
    if document["unfinished"]:
        parts.append(f"{document['unfinished']:,} unfinished")
    lines = [f"{', '.join(parts)}, in {document['duration']:.2f} s"]
    if document["interrupted"]:
        lines.append("interrupted: this is what there was until then")
    return lines


def _latencies(document: Document) -> Table:
    """One row a latency and a place to count it from; `from the send` is what vLLM's benchmark reports."""
    table = Table(title="Latencies (ms)", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    percentiles = _percentiles(document)
    table.add_column("")
    table.add_column("from")
    for heading in ("mean", "median", "std", *percentiles):
        table.add_column(heading, justify="right", no_wrap=True)
    for latency in LATENCIES:
        if f"mean_{latency}_ms" not in document:
            continue
        anchored = latency in ANCHORED
        ways = (("the send", ""), ("the schedule", FROM_SCHEDULE)) if anchored else (("token to token", ""),)
        for start, suffix in ways:
            folds = ("mean", "median", "std", *percentiles)
            values = (_figure(document[f"{name}_{latency}_ms{suffix}"]) for name in folds)
            table.add_row(NAMES[latency], start, *values)
    return table


def _percentiles(document: Document) -> list[str]:
    """The words of the percentiles that a document has, in its order."""
    found: dict[str, None] = {}
    for key in document:
        word, _, rest = key.partition("_")
        if rest in {f"{latency}_ms" for latency in LATENCIES} and word[0] == "p" and word[1:2].isdigit():
            found[word] = None
    return list(found)


def _throughput(document: Document) -> Table:
    table = Table(box=None, show_header=False, pad_edge=True)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("requests/s", _figure(document["request_throughput"]))
    table.add_row("output tokens/s", _figure(document["output_throughput"]))
    table.add_row("all tokens/s", _figure(document["total_token_throughput"]))
    if document["slo"]:
        bounds = ", ".join(f"{name.removesuffix('_ms')} {bound:g} ms" for name, bound in document["slo"].items())
        table.add_row(f"goodput, requests/s ({bounds})", _figure(document["request_goodput"]))
        shares = document["slo_attainment_by_metric"].items()
        each = ", ".join(f"{name.removesuffix('_ms')} {_share(share)}" for name, share in shares)
        table.add_row(f"SLO attainment, from the schedule ({each})", _share(document["slo_attainment"]))
        table.add_row("SLO attainment, from the send", _share(document["slo_attainment_from_send"]))
    rate = document["requested_rate"]
    asked = "all at once" if rate == "inf" else _figure(rate)
    table.add_row("requests/s asked for", asked)
    table.add_row("requests/s sent", _figure(document["achieved_rate"]))
    return table


def _notes(document: Document) -> list[str]:
    """What a reader should know of the figures."""
    notes, tokens, chunks = [], document["tokens"], document["chunks"]
    if document.get("scale_time") not in (None, 1.0):
        notes.append(f"times and rates are the cluster's model time; a second of it takes {document['scale_time']:g} s")
    for what, kind in (("prompts", "input"), ("outputs", "output")):
        if tokens[f"{kind}_mismatches"]:
            got, asked = document[f"total_{kind}_tokens"], tokens[f"asked_{kind}_tokens"]
            notes.append(
                f"{what} not as long as asked for: {tokens[f'{kind}_mismatches']:,}; {got:,} tokens in all, asked for "
                f"were {asked:,} ({got / asked - 1:+.1%})"
            )
    if tokens["usage_chunk_mismatches"]:
        notes.append(
            f"answers of more or fewer tokens than chunks: {tokens['usage_chunk_mismatches']:,} "
            f"({tokens['tokens_per_chunk']:.3g} tokens a chunk on average); ITL is between chunks, TPOT counts tokens"
        )
    if tokens["output_counted_by"]["chunks"]:
        notes.append(
            f"answers whose tokens the server did not count: {tokens['output_counted_by']['chunks']:,}; "
            "each chunk counts as one"
        )
    if chunks["without_done"]:
        notes.append(f"streams that ended without [DONE]: {chunks['without_done']:,}")
    wait = document["concurrency_wait_ms"]
    if document["max_concurrency"] is not None and wait is not None and wait["max"] > 0:
        notes.append(
            f"at most {document['max_concurrency']} requests at a time: they waited {wait['mean']:.1f} ms on average "
            f"and {wait['max']:.1f} ms at most before they were sent, which only latency from the schedule has"
        )
    return notes


def _fidelity(document: Document) -> list[Text]:
    fidelity = document["fidelity"]
    if fidelity["ok"]:
        delay = fidelity["schedule_delay_ms_p99"]
        return [Text(f"fidelity ok: p99 schedule delay {_figure(delay)} ms", style="green")]
    return [Text(f"fidelity failed: {reason}", style="bold red") for reason in fidelity["reasons"]]


def _figure(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"

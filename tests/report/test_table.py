from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from emulator.core.calibrated_units import CalibrationUsed
from emulator.core.compare_summary import CompareSummary
from emulator.core.device_use import DeviceUse, NodeDevice, SharedDevice
from emulator.core.run_summary import EndedBy
from emulator.report.table import (
    breakdown_table,
    comparison_table,
    cost_cells,
    cost_table,
    figure_text,
    ms_text,
    notes,
    percent_text,
    render,
    warnings,
    withheld_lines,
)
from tests.core.made_records import made_record, made_run
from tests.report.made_compare import SLO, made_compare, made_results


@pytest.fixture(scope="module")
def compare() -> CompareSummary:
    return made_compare(made_results())


def printed(what: object, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue()


def test_every_number_stays_whole_at_100_columns(compare: CompareSummary) -> None:
    text = printed(render(compare))
    assert max(len(line) for line in text.splitlines()) <= 100
    for run in compare.runs:
        ttft = f"{ms_text(run.ttft_ms.p50)}/{ms_text(run.ttft_ms.p99)}"
        for cell in (f"{run.completed}/{run.requests}", ttft, *cost_cells(run)):
            assert re.search(rf"(?<!\S){re.escape(cell)}(?!\S)", text), cell
    assert "…" not in text


def test_the_table_says_what_to_distrust(compare: CompareSummary) -> None:
    text = printed(render(compare), width=200)
    assert "1p1d at 1Gbps: saturated, 10 of 20 requests unfinished at the drain deadline" in text
    assert "1p1d at 5Gbps: fidelity: loop lag p99 4.2 ms is above 2 ms (scale.time = 2 would do)" in text
    assert re.search(r"1Gbps +10/20 .* saturated", text)


@pytest.mark.parametrize(("ended_by", "when"), [("stop", "it was stopped"), ("limit", "its record ended")])
def test_what_was_unfinished_when_a_record_was_ended_is_told_and_is_no_saturation(ended_by: EndedBy, when: str) -> None:
    made = made_run([made_record(), made_record("b", outcome="unfinished")], SLO, deployment="1p1d", ended_by=ended_by)
    assert warnings(made.summary) == [f"1p1d: 1 of 2 requests unfinished when {when}"]
    assert notes(made.summary) == []


def test_what_was_prefilled_where_it_was_decoded_stands_beside_its_row() -> None:
    moved, stayed = made_record("a", wire_ms=5.0), made_record("b")
    stayed = msgspec.structs.replace(stayed, prefill_node="decode-0")
    made = made_run([moved, moved, stayed], SLO, deployment="1p1d", kv_bandwidth_bps=1e9, first_token="handoff")
    assert re.search(r"1p1d +1Gbps +3/3 .* 33% local", printed(comparison_table([made.summary])))
    none = made_run([moved], SLO, deployment="1p1d", kv_bandwidth_bps=1e9, first_token="handoff")
    assert "local" not in printed(comparison_table([none.summary]))


def test_the_verdict_against_the_best_baseline_comes_first(compare: CompareSummary) -> None:
    text = printed(render(compare), width=200)
    order = [
        text.index("Verdict against the best baseline"),
        text.index("1p1d hurts against colocated-chunked-512 at 10Gbps"),
        text.index("Against the other baselines"),
        text.index("against colocated-prefill-first at 10Gbps"),
        text.index("Withheld"),
    ]
    assert order == sorted(order)


def test_a_reason_is_said_once_for_all_baselines(compare: CompareSummary) -> None:
    assert len(compare.withheld) == 2
    (line,) = withheld_lines(compare.withheld)
    assert line.startswith("1p1d at 5Gbps against colocated-prefill-first, colocated-chunked-512: ")


def test_the_breakdown_shows_the_wire(compare: CompareSummary) -> None:
    text = printed(breakdown_table(compare.runs))
    assert re.search(r"1p1d +5Gbps .* 80\.0 ", text)
    assert "-0.00" not in text


def test_costs_stand_below_with_what_they_rest_on(compare: CompareSummary) -> None:
    """20 requests in ten seconds at 7.20 USD/h and 1 kW: 1,000 a dollar and 2 a kJ; none that stalled is good."""
    text = printed(cost_table(compare.runs))
    assert text.splitlines()[0].strip() == "Costs (prices are indicative; watts are TDP, an upper bound)"
    assert re.search(
        r"^ *colocated- +- +7\.20 +1,000 +2 x 16\.0 +57\.8 +1,000/0\.00 +2\.00/0\.00 *$", text, re.MULTILINE
    )
    assert re.search(r"^ *1p1d +5Gbps +7\.20 +1,000 +2 x 16\.0 +57\.8 +1,000/1,000 +2\.00/2\.00 *$", text, re.MULTILINE)
    assert text.splitlines()[0].strip() in printed(render(compare))
    narrow = printed(render(compare, width=80), width=80)
    assert re.search(r"^ *1p1d +5Gbps +7\.20 +2 x 16\.0 +1,000/1,000 +2\.00/2\.00 *$", narrow, re.MULTILINE)


def test_costs_that_are_not_known_are_dashes() -> None:
    run = made_run([], SLO, deployment="nobody", holdings=None).summary
    assert printed(cost_table([run])).splitlines()[-2].split() == ["nobody", *"-------"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0.00"), (0.1254, "0.125"), (99.96, "100"), (1250, "1,250")]
)
def test_figures_have_three_digits_and_all_before_the_point(value: float | None, text: str) -> None:
    assert figure_text(value) == text


def test_the_breakdown_has_a_column_for_the_first_decode_step_only_where_there_is_one(compare: CompareSummary) -> None:
    parts = msgspec.structs.replace(compare.runs[2].ttft_breakdown_ms, decode=12.3)
    recomputed = msgspec.structs.replace(compare.runs[2], ttft_breakdown_ms=parts)
    assert re.search(r"1p1d .* 12\.3 ", printed(breakdown_table([*compare.runs, recomputed])))
    assert "12.3" not in printed(breakdown_table(compare.runs))
    assert printed(breakdown_table(compare.runs)).count("decode") == 1, "that of decode memory"


def test_a_plain_file_gets_no_escape_codes_and_markup_is_not_read() -> None:
    text = printed(render(made_compare(made_results("[red]x"))), width=200)
    assert "\x1b" not in text
    assert "[red]x" in text


def test_nothing_to_compare() -> None:
    assert "No verdict" in printed(render(made_compare(made_results()[:1])))
    assert "No verdict" in printed(render(made_compare([])))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.00"), (-1e-9, "0.00"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (12345.6, "12346")],
)
def test_milliseconds_to_three_figures(value: float | None, text: str) -> None:
    assert ms_text(value) == text


def test_shares_as_percent() -> None:
    assert (percent_text(None), percent_text(0.975)) == ("-", "97.5%")


def shared_gpu() -> DeviceUse:
    """A run whose two nodes were on one GPU."""
    names = ("prefill-0", "decode-0")
    nodes = tuple(NodeDevice(node=name, device_id="gpu:a", description="NVIDIA H200") for name in names)
    shared = SharedDevice(description="NVIDIA H200", nodes=names, stretch_p50=1.04, stretch_p99=1.92)
    return DeviceUse(kind="cuda", nodes=nodes, shared=(shared,), sharing_allowed=True)


def test_a_shared_gpu_is_stamped_beside_its_row_and_below_the_table() -> None:
    run = made_run([made_record(wire_ms=5.0)], SLO, deployment="1p1d", kv_bandwidth_bps=1e9, device=shared_gpu())
    text = printed(render(made_compare([run])), width=200)
    assert re.search(r"1p1d +1Gbps +1/1 .* shared GPU", text)
    assert "1p1d at 1Gbps: SHARED GPU: prefill-0 and decode-0 compute on one NVIDIA H200; their steps stretch" in text
    assert "took 1.04 times as long as planned at the median, 1.92 times at p99" in text
    assert "Device cuda: prefill-0 and decode-0 on NVIDIA H200" in text


def test_each_piece_of_hardware_is_named_once_and_a_virtual_device_never() -> None:
    use = shared_gpu()
    alone = msgspec.structs.replace(use, shared=(), nodes=(*use.nodes[:1], _second_gpu("decode-0")))
    runs = [made_run([made_record()], SLO, deployment=name, device=alone) for name in ("a", "b")]
    virtual = made_run([made_record()], SLO, deployment="c")
    text = printed(render(made_compare([*runs, virtual])), width=200)
    assert text.count("Device cuda: prefill-0 on NVIDIA H200") == 1
    assert text.count("Device cuda: decode-0 on NVIDIA H200") == 1
    assert "shared" not in text
    assert "Device" not in printed(render(made_compare([virtual])))


def test_each_calibration_is_named_once() -> None:
    used = CalibrationUsed(file="h200.toml", device="NVIDIA H200 (driver 1.0)", measured_at="2026-11-30T07:00:00+00:00")
    use = msgspec.structs.replace(shared_gpu(), calibration=used)
    runs = [made_run([made_record()], SLO, deployment=name, device=use) for name in ("a", "b")]
    line = "Steps planned by h200.toml: NVIDIA H200 (driver 1.0), 2026-11-30T07:00:00+00:00"
    assert printed(render(made_compare(runs)), width=200).count(line) == 1


def _second_gpu(node: str) -> NodeDevice:
    return NodeDevice(node=node, device_id="gpu:b", description="NVIDIA H200")

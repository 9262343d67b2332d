"""What a terminal shows of a search, from made results."""

from __future__ import annotations

from io import StringIO

import msgspec
from rich.console import Console

from emulator.core.device_use import DeviceUse, SharedDevice
from emulator.core.search import Goodput, judge
from emulator.core.search_summary import LivePoint, SearchSummary, goodput_advantages, slo_advantages
from emulator.core.slo_scale import SloScale
from emulator.core.specs import Slo
from emulator.report.search_table import MISSING_END, advantage_text, interval_text, remarks, render

TRIALS = (
    judge(4.0, [1.0, 0.98], 0.9),
    judge(5.0, [0.95, 0.91], 0.9),
    judge(5.1, [0.88, 0.84], 0.9, failure="the prompt is too long"),
)
COLOCATED = Goodput(
    deployment="colocated-prefill-first",
    kv_bandwidth_bps=None,
    gpus=2,
    rate_per_s=5.0,
    per_gpu=2.5,
    usd_per_h=9.0,
    watts=2_000.0,
    requests_per_usd=2_000.0,
    requests_per_joule=0.0025,
    next_rate_per_s=5.1,
    low_per_s=4.0,
    high_per_s=None,
    bounded_by=None,
    trials=TRIALS,
    notes=("users go on",),
)
SPLIT = msgspec.structs.replace(
    COLOCATED,
    deployment="1P1D",
    kv_bandwidth_bps=5e9,
    rate_per_s=6.0,
    per_gpu=3.0,
    requests_per_usd=2_400.0,
    requests_per_joule=0.003,
    next_rate_per_s=None,
    bounded_by="high",
    trials=(judge(6.0, [1.0, 1.0], 0.9),),
)
LOST = msgspec.structs.replace(
    COLOCATED,
    deployment="2P1D",
    kv_bandwidth_bps=5e9,
    rate_per_s=None,
    per_gpu=None,
    requests_per_usd=None,
    requests_per_joule=None,
    next_rate_per_s=1.0,
    bounded_by="low",
    trials=(judge(1.0, [0.4, 0.5], 0.9),),
)
TIGHTEST = SloScale(
    deployment="colocated",
    kv_bandwidth_bps=None,
    gpus=2,
    rate_per_s=6.0,
    factor=0.5,
    low=0.4,
    high=0.6,
    attainment=(0.9, 0.9),
    mean=0.9,
    mean_as_stated=1.0,
    bounds_ms={"ttft_ms": 500.0},
    deciding_metric="ttft_ms",
    requests=100,
    failed=0,
)


def shown(found: SearchSummary, width: int = 100) -> str:
    """What a terminal of so many columns shows."""
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(render(found, width=width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def summary(**found: object) -> SearchSummary:
    """A search with three seeds of 20 s."""
    made = SearchSummary(
        topology="t", first_token="handoff", seed=1, seeds=3, duration_s=20.0, slo=Slo(ttft_ms=1000.0), tolerance=0.02
    )
    return msgspec.structs.replace(made, **found)


POINT = LivePoint(
    deployment="1P1D",
    kv_bandwidth_bps=5e9,
    rate_per_s=6.0,
    slo_factor=1.0,
    launcher="local",
    shaping="paced",
    seed=1,
    simulated=0.95,
    live=0.94,
    withheld=None,
    fidelity=None,
    folder="o",
)


def test_a_row_has_goodput_interval_and_ratio() -> None:
    rows = (COLOCATED, SPLIT, LOST)
    text = shown(summary(goodput=rows, advantages=goodput_advantages(rows)))
    lines = text.splitlines()
    assert "90% of requests" in lines[0]
    assert "3 seeds of 20s" in lines[0]
    split = "1P1D 5Gbps 2 ≥ 6 4 to - ≥ 3 ≥ 2,400 ≥ 3.00 - ≥ 1.20x"
    assert _cells(text, "1P1D") == split.split()
    assert _cells(text, "2P1D") == ["2P1D", "5Gbps", "2", "<", "1", "4", "to", "-", "-", "-", "-", "1", "-"]
    assert _cells(text, "colocated-")[-5:] == ["2.5", "2,000", "2.50", "5.1", "-"]
    assert "Per dollar and kJ: prices are indicative; watts are TDP, an upper bound." in text
    assert MISSING_END in text


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    goodputs, tightest = (COLOCATED, SPLIT, LOST), (TIGHTEST, msgspec.structs.replace(TIGHTEST, deployment="other"))
    slo = Slo(ttft_ms=1000.0, tpot_ms=40.0, e2el_ms=9000.0, itl_p99_ms=100.0)
    for found in (
        summary(goodput=goodputs, advantages=goodput_advantages(goodputs)),
        summary(slo_scale=tightest, advantages=slo_advantages(tightest), slo=slo),
    ):
        for width in (80, 100):
            lines = [line.split() for line in shown(found, width=width).splitlines()]
            headings = next(line for line in lines if line[:1] == ["deployment"])
            assert headings[1] == "KV"
            assert headings[-1] in ("colocated", "best"), "the last column is there"
            assert ("ms" in headings or "GPUs" in headings) is (width == 100)
            assert ("kJ" in shown(found, width=width)) is (width == 100 and bool(found.goodput))


def test_what_bounds_a_row_is_a_sentence_and_one_said_of_several_is_said_once() -> None:
    rows = (COLOCATED, SPLIT, LOST)
    said = remarks(rows, goodput_advantages(rows))
    assert said.count("colocated-prefill-first, 1P1D at 5Gbps, 2P1D at 5Gbps: users go on") == 1
    assert any(line.startswith("1P1D at 5Gbps: passes at 6/s, the end of the range") for line in said)
    assert any("2P1D at 5Gbps: no rate passes: 1/s is the lowest tried, with attainment 45.0%" in line for line in said)
    assert any("at 5.1/s requests failed, the first because: the prompt is too long" in line for line in said)


def test_a_row_that_the_seeds_do_not_tell_from_the_baseline_says_so() -> None:
    known = msgspec.structs.replace(COLOCATED, high_per_s=5.2)
    near = msgspec.structs.replace(known, deployment="near", kv_bandwidth_bps=1e9)
    apart = msgspec.structs.replace(near, deployment="apart", low_per_s=5.3, high_per_s=6.0)
    rows = (known, near, apart)
    said = remarks(rows, goodput_advantages(rows))
    overlaps = "its interval overlaps that of colocated-prefill-first"
    assert [line.split(":")[0] for line in said if overlaps in line] == ["near at 1Gbps"]


def test_a_tightest_slo_shows_its_bounds_and_how_much_tighter_it_is() -> None:
    split = msgspec.structs.replace(TIGHTEST, deployment="1P1D", kv_bandwidth_bps=1e9, factor=0.25)
    none = msgspec.structs.replace(split, deployment="lost", factor=None, failed=70, bounds_ms={})
    rows = (TIGHTEST, split, none)
    text = shown(summary(slo_scale=rows, advantages=slo_advantages(rows)))
    assert "at 6 requests/s" in text
    assert _cells(text, "1P1D")[-4:] == ["500", "TTFT", "100.0%", "2.00x"]
    assert "lost at 1Gbps: no SLO holds, however loose: 70 of 100 requests did not complete" in text


def test_an_unfaithful_live_run_is_withheld_with_its_reason() -> None:
    lost = msgspec.structs.replace(POINT, live=None, withheld="steps were late")
    text = shown(summary(goodput=(SPLIT,), advantages=(None,), live=(POINT, lost)))
    assert "95.0%" in text
    assert "94.0%" in text
    assert "1P1D at 6 req/s: withheld: steps were late" in text


def test_a_live_point_whose_nodes_shared_a_gpu_is_stamped() -> None:
    shared = SharedDevice(description="NVIDIA H200", nodes=("prefill-0", "decode-0"))
    use = DeviceUse(kind="cuda", shared=(shared,), sharing_allowed=True)
    text = shown(summary(goodput=(SPLIT,), advantages=(None,), live=(msgspec.structs.replace(POINT, device=use),)))
    assert "1P1D at 6 req/s: SHARED GPU: prefill-0 and decode-0 compute on one NVIDIA H200" in text


def test_missing_values_are_dashes() -> None:
    assert interval_text(None, 5.0) == "- to 5"
    assert interval_text(None, None) == "-"
    assert advantage_text(None) == "-"


def _cells(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from emulator.core.bootstrap import interval_of_mean
from emulator.core.compare_summary import BandwidthOutcome, BreakEven, Verdict
from emulator.core.device_use import DeviceUse, SharedDevice
from emulator.core.errors import ConfigError
from emulator.core.records import Record
from emulator.core.run_summary import Fidelity, RunResult
from emulator.core.specs import Slo
from emulator.core.verdict import Judgement, best_baseline, check_equal_hardware, judge
from tests.core.made_records import made_record, made_run

SLO = Slo(ttft_ms=1000, tpot_ms=40, itl_p99_ms=100)
COUNT = 60

Change = Callable[[int], dict[str, object]]


def traffic(change: Change = lambda i: {}, *, count: int = COUNT) -> list[Record]:
    """The same requests each time; `change(i)` says what differs in request i."""
    rng = np.random.default_rng(3)
    records = []
    for i in range(count):
        base: dict[str, object] = {"ttft_ms": 200 + 300 * rng.random(), "gaps_ms": [20 + 5 * rng.random()] * 10}
        changed = change(i)
        base["ttft_ms"] = float(base["ttft_ms"]) + float(changed.pop("more_ttft_ms", 0.0))  # type: ignore[arg-type]
        records.append(made_record(f"r{i}", scheduled_s=i / 6, **(base | changed)))  # type: ignore[arg-type]
    return records


def split(records: Sequence[Record], bandwidth_bps: float = 1e10, **options: object) -> RunResult:
    options.setdefault("deployment", "1p1d")
    return made_run(records, SLO, kv_bandwidth_bps=bandwidth_bps, **options)  # type: ignore[arg-type]


def only(judgement: Judgement) -> Verdict:
    (verdict,) = judgement.verdicts
    return verdict


def stalled(i: int) -> dict[str, object]:
    """Every third request meets a stall of 300 ms."""
    return {"gaps_ms": [20.0] * 9 + [300.0]} if i % 3 == 0 else {}


def test_more_requests_within_their_slo_helps() -> None:
    verdict = only(judge([made_run(traffic(stalled), SLO), split(traffic())], SLO))
    assert (verdict.outcome, verdict.deciding_metric) == ("helps", "slo_attainment")
    difference = verdict.by_bandwidth[0].differences["slo_attainment"]
    assert difference.mean == pytest.approx(1 / 3)
    assert difference.low is not None
    assert 0.15 < difference.low < 1 / 3
    assert "1p1d helps against colocated at 10Gbps" in verdict.text
    assert "100.0% against 66.7% (+33.3 points" in verdict.text


def test_fewer_requests_within_their_slo_hurts() -> None:
    verdict = only(judge([made_run(traffic(), SLO), split(traffic(stalled))], SLO))
    assert (verdict.outcome, verdict.deciding_metric) == ("hurts", "slo_attainment")
    assert verdict.break_even is None
    assert verdict.break_even_reason == "only one bandwidth"


def test_identical_runs_make_no_difference() -> None:
    verdict = only(judge([made_run(traffic(), SLO), split(traffic())], SLO))
    assert (verdict.outcome, verdict.deciding_metric) == ("no difference", None)
    assert "TTFT +0.0 ms" in verdict.text


def test_a_small_transfer_is_no_difference_but_its_cost_is_said() -> None:
    ours = traffic(lambda i: {"more_ttft_ms": 2.4, "wire_ms": 2.1})
    verdict = only(judge([made_run(traffic(), SLO), split(ours)], SLO))
    assert verdict.outcome == "no difference"
    assert "TTFT +2.4 ms, of which 2.1 ms transfer." in verdict.text
    low = verdict.by_bandwidth[0].differences["ttft_ms"].low
    assert low is not None
    assert low > 0  # certain, yet not material


def test_a_transfer_after_the_first_token_is_not_said_to_be_in_it() -> None:
    ours = traffic(lambda i: {"more_ttft_ms": 2.4})
    verdict = only(judge([made_run(traffic(), SLO), split(ours, first_token="prefill")], SLO))
    assert "the transfer comes after the first token." in verdict.text
    parts = "of which 1.9 ms longer prefill and 0.5 ms more queueing for prefill (the transfer comes after it)"
    assert f"TTFT +2.4 ms, {parts}." in verdict.text
    assert "of transfer" not in verdict.text


def test_the_latency_furthest_from_its_bound_decides_and_mixed_signs_are_said() -> None:
    ours = traffic(lambda i: {"more_ttft_ms": 100.0, "wire_ms": 90.0, "gaps_ms": [12.0] * 10})
    verdict = only(judge([made_run(traffic(), SLO), split(ours)], SLO))
    assert (verdict.outcome, verdict.deciding_metric) == ("helps", "tpot_ms")
    assert "But worse: TTFT +100 ms, of which 90.0 ms transfer." in verdict.text
    assert "Also better: ITL p99" in verdict.text


def test_a_latency_without_a_bound_decides_nothing() -> None:
    slo = Slo(ttft_ms=1000)
    baseline, ours = traffic(), traffic(lambda i: {"gaps_ms": [60.0] * 10})
    verdict = only(judge([made_run(baseline, slo), made_run(ours, slo, deployment="x", kv_bandwidth_bps=1e9)], slo))
    assert verdict.outcome == "no difference"
    tpot = verdict.by_bandwidth[0].differences["tpot_ms"].mean
    assert tpot is not None
    assert tpot > 30


def sweep(*changes: Change) -> Verdict:
    runs = [split(traffic(change), bps) for change, bps in zip(changes, (1e9, 2.5e9, 5e9, 1e10), strict=False)]
    return only(judge([made_run(traffic(stalled), SLO), *runs[::-1]], SLO))


def slow(i: int) -> dict[str, object]:
    return {"more_ttft_ms": 900.0, "wire_ms": 900.0}


def same(i: int) -> dict[str, object]:
    return stalled(i)


def good(i: int) -> dict[str, object]:
    return {}


@pytest.mark.parametrize(
    ("changes", "break_even", "reason", "words"),
    [
        ((slow, slow, good, good), BreakEven(low_bps=2.5e9, high_bps=5e9), None, "2.5Gbps, where it hurts, and 5Gbps"),
        ((slow, same, good), BreakEven(low_bps=2.5e9, high_bps=5e9), None, "where it makes no difference, and 5Gbps"),
        ((good, good), None, "always helps", "every bandwidth that was run, from 1Gbps to 2.5Gbps"),
        ((slow, same), None, "never helps", "hurts at 1Gbps, no difference at 2.5Gbps"),
        ((same, same), None, "never helps", "the same at every bandwidth"),
        ((good, slow, good), None, "not monotone", "no single turning point"),
        ((good,), None, "only one bandwidth", "No other bandwidth"),
    ],
)  # fmt: skip
def test_where_it_turns(
    changes: tuple[Change, ...], break_even: BreakEven | None, reason: str | None, words: str
) -> None:
    verdict = sweep(*changes)
    assert verdict.break_even == break_even
    assert verdict.break_even_reason == reason
    assert words in verdict.text
    bandwidths = [outcome.kv_bandwidth_bps for outcome in verdict.by_bandwidth]
    assert bandwidths == sorted(bandwidths)
    assert verdict.outcome == verdict.by_bandwidth[-1].outcome


def cut_after(count: int) -> Change:
    """The rest unfinished, as in a deployment that does not keep up; what does finish is twice as quick."""
    return lambda i: {"gaps_ms": [10.0] * 10} if i < count else {"outcome": "unfinished"}


def test_a_saturated_side_loses_by_attainment_whatever_its_survivors_say() -> None:
    verdict = only(judge([made_run(traffic(), SLO), split(traffic(cut_after(40)))], SLO))
    assert (verdict.outcome, verdict.deciding_metric) == ("hurts", "slo_attainment")
    assert verdict.by_bandwidth[0].left_out == 20
    assert "20 of 60 requests did not complete in both" in verdict.text
    assert "1p1d left 20 unfinished" in verdict.text


def test_completion_decides_when_neither_meets_its_slo() -> None:
    baseline = traffic(lambda i: {"more_ttft_ms": 5000.0})
    ours = traffic(lambda i: {"more_ttft_ms": 2000.0} if i < 40 else {"outcome": "unfinished"})
    verdict = only(judge([made_run(baseline, SLO), split(ours)], SLO))
    assert (verdict.outcome, verdict.deciding_metric) == ("hurts", "completion")
    assert "40 of 60 against 60 of 60 requests completed" in verdict.text


def test_a_latency_gained_by_leaving_requests_behind_does_not_decide() -> None:
    def few_left(i: int) -> dict[str, object]:
        return {"outcome": "unfinished"} if i >= COUNT - 5 else {"gaps_ms": [18.0] * 10}

    judgement = judge([made_run(traffic(), SLO), split(traffic(few_left))], SLO)
    outcome: BandwidthOutcome = only(judgement).by_bandwidth[0]
    tpot = outcome.differences["tpot_ms"].mean
    assert tpot is not None
    assert tpot < -2  # material among the survivors
    assert outcome.outcome == "no difference"


def test_a_handful_of_requests_decides_nothing() -> None:
    baseline, ours = traffic(stalled, count=5), traffic(lambda i: {"gaps_ms": [5.0] * 10}, count=5)
    assert only(judge([made_run(baseline, SLO), split(ours)], SLO)).outcome == "no difference"


def test_requests_are_paired_by_id() -> None:
    baseline, ours = traffic(stalled), traffic()
    verdict = only(judge([made_run(baseline[::-1], SLO), split(ours[10:])], SLO))
    assert verdict.by_bandwidth[0].pairs == 50
    assert "over the 50 requests that both were sent" in verdict.text


def test_a_run_that_was_not_faithful_is_withheld() -> None:
    late = Fidelity(ok=False, reasons=("step lateness p99 3.1 ms is above 1 ms",))
    runs = [
        made_run(traffic(stalled), SLO),
        made_run(traffic(), SLO, deployment="chunked", fidelity=late),
        split(traffic(), 1e9),
        split(traffic(), 1e10, fidelity=late),
    ]
    judgement = judge(runs, SLO)
    verdict = only(judgement)
    assert (verdict.baseline, verdict.best_baseline) == ("colocated", True)
    assert [outcome.kv_bandwidth_bps for outcome in verdict.by_bandwidth] == [1e9]
    assert [(w.baseline, w.kv_bandwidth_bps) for w in judgement.withheld] == [("colocated", 1e10), ("chunked", None)]
    assert all("step lateness p99 3.1 ms" in w.reason for w in judgement.withheld)


def test_no_request_in_common_is_withheld() -> None:
    other = [made_record(f"x{i}") for i in range(8)]
    judgement = judge([made_run(traffic(), SLO), split(other)], SLO)
    assert not judgement.verdicts
    assert "no request was sent in both" in judgement.withheld[0].reason


def test_each_baseline_is_answered_and_the_best_one_marked() -> None:
    runs = [made_run(traffic(stalled), SLO, deployment="prefill-first"), made_run(traffic(), SLO, deployment="chunked")]
    judgement = judge([*runs, split(traffic())], SLO)
    found = {verdict.baseline: (verdict.outcome, verdict.best_baseline) for verdict in judgement.verdicts}
    assert found == {"prefill-first": ("helps", False), "chunked": ("no difference", True)}
    best = best_baseline(run.summary for run in runs)
    assert best is not None
    assert best.deployment == "chunked"


def test_mean_ttft_breaks_a_tie_between_baselines() -> None:
    slower = made_run(traffic(lambda i: {"more_ttft_ms": 5.0}), SLO, deployment="slower")
    best = best_baseline([slower.summary, made_run(traffic(), SLO).summary])
    assert best is not None
    assert best.deployment == "colocated"


def test_unequal_hardware_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1p1d \(3 GPUs\) and colocated \(2 GPUs\)"):
        judge([made_run(traffic(), SLO), split(traffic(), gpus=3)], SLO)
    check_equal_hardware({"1p1d": 2}, {"colocated": 2})


def test_nothing_to_compare_and_nothing_sent() -> None:
    assert judge([], SLO) == judge([split(traffic())], SLO) == Judgement((), ())
    assert not judge([made_run([], SLO), split([])], SLO).verdicts


def test_nothing_completed_on_either_side() -> None:
    none = traffic(lambda i: {"outcome": "unfinished"})
    verdict = only(judge([made_run(none, SLO), split(none)], SLO))
    assert verdict.outcome == "no difference"
    assert verdict.by_bandwidth[0].differences["ttft_ms"].mean is None


@pytest.mark.parametrize("count", [200, 30_000])
def test_the_interval_covers_what_theory_says(count: int) -> None:
    values = np.random.default_rng(5).normal(1.0, 4.0, count)
    low, high = interval_of_mean(values)
    half = 1.96 * values.std() / count**0.5
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)
    assert interval_of_mean(values) == (low, high)


def test_a_verdict_from_a_shared_gpu_is_stamped() -> None:
    shared = SharedDevice(description="NVIDIA H200", nodes=("prefill-0", "decode-0"))
    use = DeviceUse(kind="cuda", shared=(shared,), sharing_allowed=True)
    baseline = made_run(traffic(stalled), SLO)
    verdict = only(judge([baseline, split(traffic(), device=use)], SLO))
    assert verdict.outcome == "helps"
    stamp = "SHARED GPU: prefill-0 and decode-0 compute on one NVIDIA H200; their steps stretch each other."
    assert verdict.text.endswith(f"1p1d: {stamp}")
    assert "SHARED" not in only(judge([baseline, split(traffic())], SLO)).text

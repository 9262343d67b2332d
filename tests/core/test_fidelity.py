"""Each bound of an honest emulation, broken alone, gives its reason and the scale that would cure it."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.core.device_use import DeviceUse, SharedDevice
from emulator.core.fidelity import Observed, ObservedTransfer, judge, link_ratio
from emulator.core.records import StepRecord
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Scale
from tests.builders import load_plan, node_spec, pair, run_spec
from tests.core.made_records import made_record
from tests.link_messages import over_messages

RATE = 125e6
"""Payload bytes per second of the links here: 1 Gbps."""


def _run(scale: Scale | None = None) -> RunSpec:
    return run_spec(pair(), load_plan(), payload_bytes_per_s=RATE, scale=scale)


def _two_senders() -> RunSpec:
    nodes = [*pair(), node_spec("prefill-1", role="prefill")]
    return run_spec(nodes, load_plan(), payload_bytes_per_s=RATE)


def _steps(late_ms: float, *, planned_ms: float = 20.0, n: int = 100, node: str = "decode-0") -> list[StepRecord]:
    """Steps of which one in ten is late."""
    return [
        StepRecord(
            node=node,
            kind="decode",
            start_s=float(i),
            end_s=i + (planned_ms + (late_ms if i % 10 == 0 else 0.0)) / 1e3,
            planned_s=planned_ms / 1e3,
            prefill_tokens=0,
            decode_batch=1,
            requests=1,
        )
        for i in range(n)
    ]


def _transfer(seconds: float, nbytes: int = 125_000_000, *, source: str = "prefill-0") -> ObservedTransfer:
    """Bytes to the decode node that took `seconds` on the wire, from 0 on."""
    return ObservedTransfer(source, "decode-0", ((0.0, seconds, nbytes),))


def _observed(**changes: Any) -> Observed:
    """A faithful run, with changes."""
    sent_late = made_record()
    sent_late.sent_s = sent_late.scheduled_s + 0.001
    good: dict[str, Any] = {
        "steps": _steps(0.9),
        "records": [sent_late],
        "loop_lag_s": [0.001] * 50,
        "transfers": [_transfer(1.01)],
        "cpu_busy": [0.4, 0.94],
    }
    return Observed(**{**good, **changes})


def test_a_run_within_all_bounds_is_faithful() -> None:
    fidelity = judge(_run(), _observed())
    assert fidelity.ok
    assert fidelity.reasons == ()
    assert fidelity.suggested_scale_time is None
    assert fidelity.step_lateness_ms_p99 == pytest.approx(0.9)
    assert fidelity.loop_lag_ms_p99 == pytest.approx(1.0)
    assert fidelity.schedule_delay_ms_p99 == pytest.approx(1.0)
    assert fidelity.link_ratio == pytest.approx(1 / 1.01)
    assert fidelity.cpu_busy == 0.94


def test_what_was_not_measured_is_not_judged() -> None:
    fidelity = judge(_run(), Observed(steps=[], records=[], loop_lag_s=[], transfers=[], cpu_busy=[]))
    assert fidelity.ok
    measures = (fidelity.step_lateness_ms_p99, fidelity.loop_lag_ms_p99, fidelity.schedule_delay_ms_p99)
    assert measures == (None, None, None)
    assert (fidelity.link_ratio, fidelity.cpu_busy) == (None, None)


def _late_client() -> list[Any]:
    record = made_record()
    record.sent_s = record.scheduled_s + 0.0125
    return [record]


@pytest.mark.parametrize(
    ("changes", "reason", "scale_time"),
    [
        ({"steps": _steps(2.5)}, "p99 step lateness 2.50 ms is above 1.00 ms", 3),
        ({"loop_lag_s": [0.007] * 10}, "p99 event loop lag 7.00 ms is above 2.00 ms", 4),
        ({"records": _late_client()}, "p99 schedule delay of the load generator 12.50 ms is above 5.00 ms", 3),
        ({"transfers": [_transfer(1.25)]}, "KV links reached 80.0% of the payload rate asked for", 2),
        ({"transfers": [_transfer(4.0)]}, "KV links reached 25.0% of the payload rate asked for", 4),
        ({"transfers": [_transfer(0.8)]}, "KV links reached 125.0% of the payload rate asked for", 2),
        ({"cpu_busy": [0.2, 0.97]}, "a core was 97% busy for a second", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_bound_broken_alone_gives_its_reason_and_a_cure(
    changes: dict[str, Any], reason: str, scale_time: float
) -> None:
    fidelity = judge(_run(), _observed(**changes))
    assert not fidelity.ok
    assert fidelity.reasons == (reason,)
    assert fidelity.suggested_scale_time == scale_time


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unretained_bytes": 1_500_000_000}, "1.50 GB of KV did not fit into the host memory granted; raise host_mem"),
        ({"dropped_frames": 3}, "3 KV frames were dropped"),
    ],
)
def test_what_no_slower_clock_would_cure_suggests_no_scale(changes: dict[str, Any], reason: str) -> None:
    fidelity = judge(_run(), _observed(**changes))
    assert not fidelity.ok
    assert fidelity.reasons[0].startswith(reason)
    assert fidelity.suggested_scale_time is None


def test_long_steps_may_be_late_by_four_percent_of_the_median() -> None:
    assert judge(_run(), _observed(steps=_steps(3.9, planned_ms=100.0))).ok
    assert not judge(_run(), _observed(steps=_steps(4.1, planned_ms=100.0))).ok


def test_the_worst_measure_decides_the_suggestion_which_multiplies_the_present_scale() -> None:
    worse = _observed(loop_lag_s=[0.003], steps=_steps(3.4))
    assert judge(_run(), worse).suggested_scale_time == 4
    assert judge(_run(Scale(time=2.0)), worse).suggested_scale_time == 7


def test_small_transfers_share_the_link_but_are_not_judged() -> None:
    assert link_ratio(_run(), [_transfer(1.0, nbytes=9_999_999)]) is None
    small = _transfer(0.08, nbytes=5_000_000, source="prefill-1")
    assert link_ratio(_two_senders(), [_transfer(0.96, nbytes=115_000_000), small]) == pytest.approx(1.0)


def test_senders_that_share_a_receiver_are_expected_to_share_its_rate() -> None:
    both = [_transfer(2.0), _transfer(2.0, source="prefill-1")]
    assert link_ratio(_two_senders(), both) == pytest.approx(1.0)


def test_transfers_between_two_nodes_are_expected_one_after_the_other_or_to_share_fairly() -> None:
    both = [_transfer(2.0), _transfer(2.0)]
    fair = over_messages(_run(), max_in_flight=2, order="fair")
    assert link_ratio(fair, both) == pytest.approx(1.0)
    assert link_ratio(_run(), both) == pytest.approx(0.75), "the first was due after 1 s"
    assert link_ratio(fair, [_transfer(1.0), _transfer(2.0)]) == pytest.approx(4 / 3), "the first was too fast"


def test_what_messages_cost_before_their_first_byte_is_not_charged_to_the_link() -> None:
    parts = ((0.5, 1.0, 62_500_000), (1.5, 2.0, 62_500_000))
    slow = over_messages(_run(), message_s=0.5)
    assert link_ratio(slow, [ObservedTransfer("prefill-0", "decode-0", parts)]) == pytest.approx(1.0)


def test_scaled_bytes_are_held_against_the_scaled_rate() -> None:
    run = _run(Scale(time=3.0, bytes=10.0))
    assert link_ratio(run, [_transfer(1.0, nbytes=12_500_000)]) == pytest.approx(1.0)


def test_without_a_kv_network_there_is_no_ratio() -> None:
    run = run_spec([node_spec()], load_plan())
    assert link_ratio(run, [_transfer(1.0)]) is None


SHARED = SharedDevice(description="NVIDIA H200", nodes=("prefill-0", "decode-0"), stretch_p50=1.1, stretch_p99=2.0)


def test_nodes_that_share_a_gpu_make_a_run_unfaithful_for_that_reason_alone() -> None:
    use = DeviceUse(kind="cuda", shared=(SHARED,))
    fidelity = judge(_run(), _observed(device=use, steps=_steps(30.0)))
    (reason,) = fidelity.reasons
    assert "prefill-0 and decode-0 compute on one NVIDIA H200" in reason
    assert "--allow-shared-gpu" in reason
    assert fidelity.suggested_scale_time is None, "slower clocks do not cure it"


def test_sharing_that_is_allowed_holds_the_steps_that_contend_to_no_bound() -> None:
    use = DeviceUse(kind="cuda", shared=(SHARED,), sharing_allowed=True)
    fidelity = judge(_run(), _observed(device=use, steps=_steps(30.0)))
    assert fidelity.ok
    assert fidelity.step_lateness_ms_p99 is None
    alone = judge(_run(), _observed(device=use, steps=[*_steps(30.0), *_steps(2.5, node="decode-1")]))
    assert alone.reasons == ("p99 step lateness 2.50 ms is above 1.00 ms",)


def test_steps_of_a_device_that_computes_for_one_node_are_held_to_the_same_bound() -> None:
    for kind in ("numpy", "cuda"):
        assert judge(_run(), _observed(device=DeviceUse(kind=kind))).ok
        assert not judge(_run(), _observed(device=DeviceUse(kind=kind), steps=_steps(2.5))).ok


def test_cores_that_are_the_device_may_be_busy() -> None:
    busy = {"cpu_busy": [1.0]}
    assert judge(_run(), _observed(device=DeviceUse(kind="numpy"), **busy)).ok
    assert not judge(_run(), _observed(device=DeviceUse(kind="cuda"), **busy)).ok


def test_a_process_that_stood_still_is_named_and_no_scale_cures_it() -> None:
    """A node that was stopped for 2 s in a long run, of which the percentiles may not know."""
    fidelity = judge(_run(), _observed(longest_lag_s={"router": 0.4, "decode-0": 2.0}))
    assert fidelity.reasons == ("decode-0 did not run for 2.00 s",)
    late = judge(_run(), _observed(steps=_steps(2_000.0), longest_lag_s={"decode-0": 2.0}))
    assert late.reasons[0] == "decode-0 did not run for 2.00 s"
    assert late.reasons[1].startswith("p99 step lateness")
    assert late.suggested_scale_time is None

"""Which nodes shared a piece of hardware, in words, and how much that stretched their steps."""

from __future__ import annotations

import pytest

from emulator.core.device_spec import DevicePlan
from emulator.core.device_use import DeviceUse, NodeDevice, device_use, listed
from emulator.core.records import StepRecord
from tests.core.test_calibrated_units import CALIBRATED

H200 = "NVIDIA H200"


def _on(node: str, device_id: str) -> NodeDevice:
    return NodeDevice(node=node, device_id=device_id, description=H200)


def _step(node: str, took_s: float, *, planned_s: float = 0.1, steps: int = 1, delta_s: float = 0.0) -> StepRecord:
    return StepRecord(
        node=node,
        kind="decode",
        start_s=1.0,
        end_s=1.0 + took_s,
        planned_s=planned_s,
        prefill_tokens=0,
        decode_batch=1,
        requests=1,
        steps=steps,
        delta_s=delta_s,
    )


def _use(*, allowed: bool) -> DeviceUse:
    """Prefill and decode on one GPU, a second decode node on another."""
    plan = DevicePlan(kind="cuda", allow_shared_gpu=allowed)
    nodes = [_on("prefill-0", "gpu:a"), _on("decode-0", "gpu:a"), _on("decode-1", "gpu:b")]
    steps = [_step("prefill-0", 0.1), _step("decode-0", 0.15), _step("decode-0", 0.2), _step("decode-1", 9.0)]
    return device_use(plan, nodes, steps)


def test_nodes_with_one_id_share_a_device_and_their_steps_alone_say_how_much_that_costs() -> None:
    use = _use(allowed=True)
    (shared,) = use.shared
    assert shared.nodes == ("prefill-0", "decode-0")
    assert shared.stretch_p50 == pytest.approx(1.5)
    assert shared.stretch_p99 == pytest.approx(1.99)
    assert use.contending == {"prefill-0", "decode-0"}
    assert [node.node for node in use.nodes] == ["prefill-0", "decode-0", "decode-1"]
    ids = [node.device_id for node in use.nodes]
    assert ids[0] == ids[1] != ids[2]
    assert "gpu" not in "".join(ids), "what is written down does not tell whose hardware it is"


def test_sharing_that_is_allowed_is_stamped_and_else_objected_to() -> None:
    allowed, refused = _use(allowed=True), _use(allowed=False)
    assert allowed.objections() == []
    assert allowed.stamps() == [
        "SHARED GPU: prefill-0 and decode-0 compute on one NVIDIA H200; their steps stretch each other"
    ]
    assert refused.stamps() == []
    assert refused.objections() == [
        "prefill-0 and decode-0 compute on one NVIDIA H200; their steps stretch each other; "
        "give each a GPU of its own, or use --allow-shared-gpu"
    ]
    assert allowed.contention() == refused.contention()
    assert allowed.contention() == [
        "steps of prefill-0 and decode-0 took 1.50 times as long as planned at the median, 1.99 times at p99"
    ]


def test_processor_cores_that_are_shared_are_called_so() -> None:
    nodes = [_on("colocated-0", "cpu:x"), _on("colocated-1", "cpu:x")]
    use = device_use(DevicePlan(kind="numpy", allow_shared_gpu=True), nodes, [])
    assert use.stamps()[0].startswith("SHARED CPU: colocated-0 and colocated-1")
    assert use.contention() == [], "there were no steps"
    assert "a machine of its own" in device_use(DevicePlan(kind="numpy"), nodes, []).objections()[0]


def test_steps_alike_in_one_row_are_held_against_all_that_was_planned_for_them() -> None:
    nodes = [_on("prefill-0", "gpu:a"), _on("decode-0", "gpu:a")]
    row = _step("decode-0", 2.0 * (0.1 + 0.2 + 0.3), steps=3, delta_s=0.1)
    (shared,) = device_use(DevicePlan(kind="cuda"), nodes, [row]).shared
    assert shared.stretch_p50 == pytest.approx(2.0)


def test_the_calibration_that_steps_were_planned_by_is_told() -> None:
    nodes = [_on("prefill-0", "gpu:a")]
    assert device_use(DevicePlan(kind="cuda", calibration=CALIBRATED), nodes, []).calibration == CALIBRATED.used
    assert device_use(DevicePlan(kind="cuda"), nodes, []).calibration is None


def test_a_virtual_device_is_nobodys_and_one_without_an_id_is_not_shared() -> None:
    nodes = [_on("prefill-0", "gpu:a"), _on("decode-0", "gpu:a")]
    assert device_use(DevicePlan(), nodes, []) == DeviceUse()
    nameless = [_on("prefill-0", ""), _on("decode-0", "")]
    assert device_use(DevicePlan(kind="cuda"), nameless, []).shared == ()


def test_names_are_listed_as_in_a_sentence() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]

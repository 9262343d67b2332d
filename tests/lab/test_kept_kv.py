"""What is refused before a run for want of memory: KV from elsewhere, and with nodes that compute all KV."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from emulator.core.device_spec import DevicePlan
from emulator.core.errors import CapacityError
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.specs import Scale
from emulator.lab.kept_kv import RETAINED_MARGIN, foresee_kv_bytes
from tests.builders import load_plan, node_spec, pair, request, run_spec

NUMPY = DevicePlan(kind="numpy")
MUCH = 1 << 40


def a_run(plan: DevicePlan, nodes: Sequence[NodeSpec], *, shrink: float = 1.0) -> RunSpec:
    """One prompt of 1,600 tokens, 100 blocks, and an output of 16, one more."""
    load = load_plan([request(prompt_tokens=1_600, max_tokens=16)])
    return msgspec.structs.replace(run_spec(nodes, load, scale=Scale(bytes=shrink)), device=plan)


def test_without_devices_that_compute_only_kv_from_elsewhere_is_kept() -> None:
    assert foresee_kv_bytes(a_run(DevicePlan(), [node_spec()]), 1) == 0
    assert foresee_kv_bytes(a_run(DevicePlan(), pair()), MUCH) == 1_600_000 * RETAINED_MARGIN


@pytest.mark.parametrize(("shrink", "block_bytes"), [(1.0, 16_000), (10.0, 1_601)])
def test_nodes_that_compute_keep_all_their_blocks(shrink: float, block_bytes: int) -> None:
    for nodes in ([node_spec()], pair()):
        assert foresee_kv_bytes(a_run(NUMPY, nodes, shrink=shrink), MUCH) == int(101 * block_bytes * RETAINED_MARGIN)


@pytest.mark.parametrize(
    ("plan", "granted", "raised"),
    [
        (NUMPY, 4_000_000, "host_memory"),
        (DevicePlan(kind="numpy", memory_bytes=1_000_000), MUCH, r"memory of \[device\]"),
        (DevicePlan(kind="numpy", memory_bytes=3_000_000), 4_000_000, "host_memory"),
        (DevicePlan(kind="cuda", memory_bytes=1_000_000), MUCH, r"memory of \[device\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would_help(plan: DevicePlan, granted: int, raised: str) -> None:
    """Two nodes of 2.02 MB each."""
    with pytest.raises(CapacityError, match=rf"scale.bytes = \d+, or raise {raised}$"):
        foresee_kv_bytes(a_run(plan, pair()), granted)


@pytest.mark.parametrize("shrink", [1.0, 3.7])
@pytest.mark.parametrize("granted", [1_000_000, 100_000, 999, 300])
def test_the_scale_that_is_suggested_suffices_and_none_below_does(granted: int, shrink: float) -> None:
    with pytest.raises(CapacityError, match=r"[kM]B of KV would be") as refused:
        foresee_kv_bytes(a_run(NUMPY, pair(), shrink=shrink), granted)
    scale = int(str(refused.value).partition("scale.bytes = ")[2].partition(",")[0])
    assert foresee_kv_bytes(a_run(NUMPY, pair(), shrink=scale), granted) * 2 <= granted
    with pytest.raises(CapacityError):
        foresee_kv_bytes(a_run(NUMPY, pair(), shrink=scale - 1), granted)


def test_where_no_scale_suffices_none_is_suggested() -> None:
    """A block has a byte at least."""
    with pytest.raises(CapacityError, match=r"250B are granted; send fewer requests at a time, or raise host_memory$"):
        foresee_kv_bytes(a_run(NUMPY, pair()), 250)


def test_where_few_requests_share_a_node_one_more_may_come_at_a_time() -> None:
    """Three requests in turn: a simulation never sees two of them at once, real time may."""
    load = load_plan([request(f"r{n}", at_s=100.0 * n, prompt_tokens=160, max_tokens=16) for n in range(3)])
    run = msgspec.structs.replace(run_spec([node_spec()], load), device=NUMPY)
    assert foresee_kv_bytes(run, MUCH) == 2 * 11 * 16_000


def test_host_memory_is_nothing_to_a_gpu() -> None:
    assert foresee_kv_bytes(a_run(DevicePlan(kind="cuda"), pair()), 1) == int(101 * 16_000 * RETAINED_MARGIN)

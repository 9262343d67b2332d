"""One run, both drivers: live processes under a virtual clock and the simulator make the same batches and tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from emulator.core.deploy import plan_runs
from emulator.core.deployments import Admission, FirstToken, Overlap, Preemption, TransferMode, TransferOrder
from emulator.core.quantities import Seconds
from emulator.core.records import Record, StepRecord
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Scale
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.topology_files import load_topology
from emulator.simulate import simulate
from tests.builders import by_id
from tests.drawn import EVERY_ADMISSION, EVERY_FIRST_TOKEN, EVERY_PREEMPTION, EVERY_TRANSFER_MODE
from tests.handed_over import handed_over
from tests.virtual_live import run_live

MICROSECOND = 1e-6
TOPOLOGIES = Path(__file__).parents[1] / "topologies"
INSTANTS = (
    "sent_s", "first_token_s", "finish_s", "kv_start_s", "kv_end_s", "queued_s", "admitted_s", "prefill_end_s",
    "streamed_s",
)  # fmt: skip


def _runs(name: str, duration_s: float = 6.0, drain_s: float = 15.0) -> list[RunSpec]:
    topology = load_topology(TOPOLOGIES / f"{name}.toml")
    workload = msgspec.structs.replace(topology.workload, duration=Seconds(duration_s), drain=Seconds(drain_s))
    topology = msgspec.structs.replace(topology, workload=workload, scale=Scale())
    return plan_runs(topology, load_catalog(), plan_load(workload, {}))


def _id(run: RunSpec) -> str:
    return f"{run.topology}-{run.label}"


NAMES = ("quickstart", "2p1d", "1p2d", "2p2d", "short-prompts", "worked-example")
EVERY = [run for name in NAMES for run in _runs(name)]


def _short_of_memory(run: RunSpec) -> RunSpec:
    nodes = [msgspec.structs.replace(node, kv_blocks=400) for node in run.nodes]
    return msgspec.structs.replace(run, nodes=tuple(nodes), deployment=f"{run.deployment}-400-blocks")


def _slow_unless(quick: bool, value: object) -> object:
    """A parameter, left out of the quick tests unless `quick`."""
    return value if quick else pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("run", [_slow_unless(run.topology == "quickstart", run) for run in EVERY], ids=_id)
def test_both_drivers_make_the_same_batches_and_tokens(run: RunSpec) -> None:
    _check(run)


@pytest.mark.parametrize("run", [_short_of_memory(run) for run in _runs("quickstart")], ids=_id)
def test_and_when_memory_is_short(run: RunSpec) -> None:
    _check(run)


def _handed_over(run: RunSpec, first_token: FirstToken, admission: Admission) -> RunSpec:
    """The run handed over in this way; memory is short, so that it matters."""
    router = msgspec.structs.replace(run.router, first_token=first_token, admission=admission)
    run = _short_of_memory(msgspec.structs.replace(run, router=router))
    return msgspec.structs.replace(run, deployment=f"{first_token}-{admission}")


@pytest.mark.parametrize(
    "run",
    [
        _slow_unless(
            admission == "decode_reserve_first",
            _handed_over(_runs("quickstart", duration_s=4.0)[-1], first_token, admission),
        )
        for first_token, admission in itertools.product(EVERY_FIRST_TOKEN, EVERY_ADMISSION)
    ],
    ids=_id,
)
def test_and_however_requests_are_handed_over(run: RunSpec) -> None:
    records = _check(run)
    assert any(record.outcome == "completed" and record.kv_bytes for record in records)
    assert any(record.admitted_s is not None for record in records) is (run.router.admission == "decode_reserve_first")
    assert any(record.streamed_s is not None for record in records) is (run.first_token != "handoff")


def _given_up(first_token: FirstToken, transfer_mode: TransferMode, preemption: Preemption) -> RunSpec:
    """The run with so little memory that decode nodes have to take it away."""
    run = _short_of_memory(_runs("quickstart", duration_s=4.0)[-1])
    nodes = [msgspec.structs.replace(node, num_reserved_decode_tokens=0) for node in run.nodes]
    run = msgspec.structs.replace(run, nodes=tuple(nodes), deployment=f"{first_token}-{transfer_mode}-{preemption}")
    return handed_over(run, first_token=first_token, transfer_mode=transfer_mode, preemption=preemption)


@pytest.mark.parametrize("transfer_mode", EVERY_TRANSFER_MODE)
@pytest.mark.parametrize("preemption", EVERY_PREEMPTION)
@pytest.mark.parametrize("first_token", [_slow_unless(mode == "handoff", mode) for mode in EVERY_FIRST_TOKEN])
def test_and_whoever_moves_kv_and_computes_again_what_lost_it(
    first_token: FirstToken, preemption: Preemption, transfer_mode: TransferMode
) -> None:
    records = _check(_given_up(first_token, transfer_mode, preemption))
    assert any(record.outcome == "completed" and record.preemptions for record in records)
    assert any(record.kv_bytes_again for record in records) is (preemption == "prefill")


def _by_layers(run: RunSpec, layer_groups: int) -> RunSpec:
    nodes = [msgspec.structs.replace(node, overlap="layer", layer_groups=layer_groups) for node in run.nodes]
    return msgspec.structs.replace(run, nodes=tuple(nodes), deployment=f"{run.deployment}-{layer_groups}-groups")


@pytest.mark.parametrize(
    "run",
    [
        _by_layers(_runs("quickstart", duration_s=4.0)[-1], 8),
        _by_layers(_short_of_memory(_runs("quickstart", duration_s=4.0)[-1]), 5),
        _by_layers(_handed_over(_runs("quickstart", duration_s=4.0)[-1], "recompute", "decode_reserve_first"), 2),
        _by_layers(_runs("2p2d", duration_s=4.0)[-1], 7),
    ],
    ids=_id,
)
def test_and_when_kv_leaves_by_groups_of_layers(run: RunSpec) -> None:
    records = _check(run)
    assert any(_left_within_its_prefill(record) for record in records)


def _left_within_its_prefill(record: Record) -> bool:
    start_s, end_s = record.kv_start_s, record.prefill_end_s
    return start_s is not None and end_s is not None and start_s < end_s - MICROSECOND


def _over_messages(run: RunSpec, overlap: Overlap, order: TransferOrder, in_flight: int, message_s: float) -> RunSpec:
    """The run over a link a tenth as fast, so that transfers meet, whose messages are sent in this way."""
    assert run.link is not None
    nodes = [msgspec.structs.replace(node, overlap=overlap, max_num_batched_tokens=512) for node in run.nodes]
    link = msgspec.structs.replace(
        run.link,
        payload_bps=run.link.payload_bps / 10,
        message_s=message_s,
        max_in_flight=in_flight,
        order=order,
    )
    deployment = f"{overlap}-{order}-{in_flight}-{message_s * 1e3:g}ms"
    return msgspec.structs.replace(run, nodes=tuple(nodes), link=link, deployment=deployment)


@pytest.mark.parametrize(
    "run",
    [
        _slow_unless(name == "2p2d", _over_messages(_runs(name, duration_s=4.0)[-1], *how))
        for name in ("quickstart", "2p2d")
        for how in (("chunk", "fair", 3, 0.002), ("none", "fair", 3, 0.0), ("chunk", "fifo", 2, 0.002))
    ],
    ids=_id,
)
def test_and_however_many_messages_are_on_the_way(run: RunSpec) -> None:
    spans: defaultdict[object, list[tuple[float, float]]] = defaultdict(list)
    for record in _check(run):
        if record.kv_start_s is not None and record.kv_end_s is not None:
            spans[record.prefill_node, record.decode_node].append((record.kv_start_s, record.kv_end_s))
    pairs = [pair for of_pair in spans.values() for pair in itertools.pairwise(sorted(of_pair))]
    assert any(after[0] < before[1] for before, after in pairs), "transfers meet"


@pytest.mark.parametrize("run", _runs("quickstart", drain_s=0.2), ids=_id)
def test_and_when_the_run_is_cut(run: RunSpec) -> None:
    records = _check(run)
    assert any(record.outcome == "unfinished" for record in records)


def _check(run: RunSpec) -> list[Record]:
    live, simulated = run_live(run), simulate(run, exact_steps=True)
    steps = [step for node in live.nodes for step in node.steps]
    cut_s = run.load.duration_s + run.load.drain_s - MICROSECOND
    done, expected_steps = _by_node(steps, cut_s), _by_node(simulated.steps, cut_s)
    assert {node: list(map(_batch, found)) for node, found in done.items()} == {
        node: list(map(_batch, found)) for node, found in expected_steps.items()
    }
    for node, found in done.items():
        np.testing.assert_allclose(_instants(found), _instants(expected_steps[node]), rtol=0, atol=MICROSECOND)
    expected = by_id(simulated.records)
    assert by_id(live.records).keys() == expected.keys()
    for record in live.records:
        _same(record, expected[record.request_id])
    return list(live.records)


def _by_node(steps: Iterable[StepRecord], cut_s: float) -> dict[str, list[StepRecord]]:
    """What every node did, in order; steps that the aborts of the cut may have changed are left out."""
    found = defaultdict(list)
    for step in sorted(steps, key=lambda s: s.start_s):
        if step.start_s + step.planned_s < cut_s:
            found[step.node].append(step)
    return found


def _batch(step: StepRecord) -> tuple[object, ...]:
    return step.kind, step.prefill_tokens, step.decode_batch, step.requests, step.kv_blocks_used


def _instants(steps: Iterable[StepRecord]) -> list[tuple[float, float]]:
    return [(step.start_s, step.planned_s) for step in steps]


def _same(live: Record, simulated: Record) -> None:
    assert (live.outcome, live.output_tokens) == (simulated.outcome, simulated.output_tokens)
    np.testing.assert_allclose(live.times(), simulated.times(), rtol=0, atol=MICROSECOND)
    if live.outcome != "completed":
        return
    for name in ("prefill_node", "decode_node", "kv_bytes", "preemptions", "kv_bytes_again"):
        assert getattr(live, name) == getattr(simulated, name), name
    for name in INSTANTS:
        seen, expected = getattr(live, name), getattr(simulated, name)
        assert seen == pytest.approx(expected, abs=MICROSECOND) if expected is not None else seen is None, name

"""When layer-wise overlap pays, and by how much, as theory says: one prompt on an idle 1P1D cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from emulator.core.deploy import plan_runs
from emulator.core.records import Record
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.topology_files import load_topology
from emulator.simulate import simulate
from tests.builders import KV_BYTES_PER_TOKEN, load_plan, pair, request, run_spec, step_times

SPLITWISE = Path("topologies/published/splitwise-transfer-h100.toml")


def _handed_over(tokens: int, groups: int, prefill_s: float, message_s: float, payload_bytes_per_s: float) -> Record:
    cost = step_times(prefill_ms_per_token=prefill_s * 1e3 / tokens, prefill_base_ms=0.0)
    nodes = [
        msgspec.structs.replace(node, overlap="layer" if groups > 1 else "none", layers=groups, layer_groups=groups)
        for node in pair(cost=cost, max_num_batched_tokens=tokens)
    ]
    load = load_plan([request("a", prompt_tokens=tokens, max_tokens=2)])
    run = run_spec(nodes, load, payload_bytes_per_s=payload_bytes_per_s)
    assert run.link is not None
    run = msgspec.structs.replace(run, link=msgspec.structs.replace(run.link, message_s=message_s))
    (record,) = simulate(run).records
    return record


@given(
    groups=st.integers(2, 40),
    prefill_s=st.floats(0.01, 1.0),
    message_s=st.floats(0.0, 0.05),
    payload_bytes_per_s=st.floats(1e6, 1e10),
)
def test_it_pays_when_the_prefill_takes_longer_than_the_overheads_of_all_its_messages(
    groups: int, prefill_s: float, message_s: float, payload_bytes_per_s: float
) -> None:
    """Layer-wise, the last byte comes at max(T + o + b/R, T/G + G (o + b/R)), serialized at T + o + G b/R."""
    assume(abs(prefill_s / (groups * message_s) - 1) > 1e-6 if message_s else True)
    tokens = 40 * groups
    serialized = _handed_over(tokens, 1, prefill_s, message_s, payload_bytes_per_s)
    layer = _handed_over(tokens, groups, prefill_s, message_s, payload_bytes_per_s)
    group_s = tokens * KV_BYTES_PER_TOKEN / groups / payload_bytes_per_s
    last, all_of_them = message_s + group_s, groups * (message_s + group_s)
    assert layer.kv_end_s == pytest.approx(max(prefill_s + last, prefill_s / groups + all_of_them))
    assert serialized.kv_end_s == pytest.approx(prefill_s + message_s + groups * group_s)
    assert layer.kv_end_s is not None
    assert serialized.kv_end_s is not None
    assert (layer.kv_end_s < serialized.kv_end_s) is (prefill_s > groups * message_s)


@pytest.mark.parametrize(("tokens", "pays"), [(256, False), (500, False), (524, True), (1469, True), (2938, True)])
def test_on_splitwises_h100_it_pays_from_some_512_tokens_on(tokens: int, pays: bool) -> None:
    serialized, layer = (_visible_s(way, tokens) for way in ("serialized", "layer-wise"))
    assert (layer < serialized) is pays


@pytest.mark.parametrize("tokens", [1469, 2938])
def test_the_second_token_pays_at_most_two_fifths_of_what_it_pays_serialized(tokens: int) -> None:
    """Published: 16.5 % against 64 % of a step."""
    serialized, layer = (_second_token_s(way, tokens) for way in ("serialized", "layer-wise"))
    alone = _second_token_s("colocated", tokens)
    assert 0 < layer - alone <= 0.4 * (serialized - alone)


def _splitwise(way: str, tokens: int) -> list[Record]:
    topology = load_topology(SPLITWISE)
    stream = msgspec.structs.replace(topology.workload.streams[0], prompt_tokens=tokens)
    workload = msgspec.structs.replace(topology.workload, streams=(stream,))
    deployments = tuple(
        msgspec.structs.replace(d, first_token="prefill") if d.disaggregated else d for d in topology.deployments
    )
    topology = msgspec.structs.replace(topology, workload=workload, deployments=deployments)
    (run,) = plan_runs(topology, load_catalog(), plan_load(workload, {}), deployments=[way])
    return simulate(run).records


def _visible_s(way: str, tokens: int) -> float:
    record = _splitwise(way, tokens)[0]
    assert record.kv_end_s is not None
    assert record.prefill_end_s is not None
    return record.kv_end_s - record.prefill_end_s


def _second_token_s(way: str, tokens: int) -> float:
    times = _splitwise(way, tokens)[0].times()
    return float(times[1] - times[0])

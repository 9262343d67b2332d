"""KV that leaves by groups of layers: closed forms of what is left of the transfer after prefill, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import metrics
from emulator.core.deployments import Admission, FirstToken, Overlap
from emulator.core.physics import violations
from emulator.core.records import Record
from emulator.simulate import Simulation, simulate
from tests.builders import by_id, load_plan, pair, request, run_spec, ttft_s
from tests.examples import examples

EXACT = 1e-9
TOKENS = 4_000
PREFILL_S = 4.0
"""Of 4,000 tokens at 1 ms each, which are 4 MB of KV."""
KV_BYTES = 4_000_000


def _alone(
    overlap: Overlap,
    bytes_per_s: float,
    *,
    layers: int = 1,
    layer_groups: int = 1,
    max_num_batched_tokens: int = TOKENS,
    prompt_tokens: int = TOKENS,
    delay_s: float = 0.0,
    first_token: FirstToken = "handoff",
) -> Record:
    """One request on an idle cluster."""
    nodes = pair(
        overlap=overlap,
        layers=layers,
        layer_groups=layer_groups,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    load = load_plan([request(prompt_tokens=prompt_tokens)])
    run = run_spec(nodes, load, payload_bytes_per_s=bytes_per_s, delay_s=delay_s, first_token=first_token)
    simulated = simulate(run)
    assert violations(run, simulated.records, simulated.steps, simulated=True) == []
    (record,) = simulated.records
    assert (record.outcome, record.kv_bytes) == ("completed", prompt_tokens * 1_000)
    return record


@pytest.mark.parametrize("groups", [2, 4, 8, 32])
@pytest.mark.parametrize("transfer_s", [0.01, 1.0, 3.9])
def test_a_transfer_shorter_than_the_prefill_shows_the_last_groups_part_of_it(groups: int, transfer_s: float) -> None:
    record = _alone("layer", KV_BYTES / transfer_s, layers=32, layer_groups=groups)
    assert record.prefill_end_s == pytest.approx(PREFILL_S, abs=EXACT)
    assert record.kv_start_s == pytest.approx(PREFILL_S / groups, abs=EXACT)
    assert record.kv_ready_s == pytest.approx(PREFILL_S, abs=EXACT)
    assert record.kv_end_s == pytest.approx(PREFILL_S + transfer_s / groups, abs=EXACT)
    assert ttft_s(record) == pytest.approx(PREFILL_S + transfer_s / groups, abs=EXACT)


@pytest.mark.parametrize("groups", [2, 4, 8, 32])
@pytest.mark.parametrize("transfer_s", [1.0, 4.0, 4.5, 40.0])
def test_a_pipeline_of_even_groups_ends_with_the_slower_of_its_two_stages(groups: int, transfer_s: float) -> None:
    record = _alone("layer", KV_BYTES / transfer_s, layers=32, layer_groups=groups)
    part_s = transfer_s / groups
    expected_s = max(PREFILL_S + part_s, PREFILL_S / groups + groups * part_s)
    assert record.kv_end_s == pytest.approx(expected_s, abs=EXACT)


def test_uneven_groups_leave_at_the_ends_of_whole_layers() -> None:
    record = _alone("layer", 2e6, layers=5, layer_groups=2)
    assert record.kv_start_s == pytest.approx(PREFILL_S * 2 / 5, abs=EXACT)
    assert record.kv_end_s == pytest.approx(PREFILL_S + 0.6 * KV_BYTES / 2e6, abs=EXACT)


def test_chunks_by_layers_show_only_the_last_group_of_the_last_chunk() -> None:
    record = _alone("layer", 2e6, layers=4, layer_groups=4, max_num_batched_tokens=1_000)
    assert record.kv_start_s == pytest.approx(1.0 / 4, abs=EXACT)
    assert record.kv_end_s == pytest.approx(PREFILL_S + 0.25e6 / 2e6, abs=EXACT)


def test_in_the_ttft_only_what_is_left_after_the_prefill_is_the_links_part() -> None:
    record = _alone("layer", 2e6, layers=4, layer_groups=4)
    parts_ms = {part: values[0] for part, values in metrics.measure([record]).ttft_parts_ms.items() if values[0] > 1e-6}
    assert parts_ms == pytest.approx({"prefill": 1e3 * PREFILL_S, "wire": 500.0})


def test_the_delay_of_the_link_is_seen_once() -> None:
    record = _alone("layer", 2e6, layers=4, layer_groups=4, delay_s=0.05)
    assert record.kv_end_s == pytest.approx(PREFILL_S + 0.5 + 0.05, abs=EXACT)


@pytest.mark.parametrize("exact", [True, False])
def test_decode_steps_on_the_other_node_do_not_disturb_it(exact: bool) -> None:
    """An earlier request decodes meanwhile, in merged steps or single ones; instants of both coincide."""
    nodes = pair(overlap="layer", layers=4, layer_groups=4)
    load = load_plan(
        [request("decodes", prompt_tokens=10, max_tokens=90), request("a", at_s=0.1, prompt_tokens=400, max_tokens=30)]
    )
    run = run_spec(nodes, load, payload_bytes_per_s=1e6)
    records = by_id(Simulation(run, exact_steps=exact).run().records)
    assert records["a"].kv_start_s == pytest.approx(0.2, abs=EXACT)
    assert records["a"].kv_end_s == pytest.approx(0.6, abs=EXACT)


@pytest.mark.parametrize(
    ("admission", "starts_s"),
    [
        # The first one leaves decode memory at 0.132056; the second one's first group takes 0.064 s.
        ("dispatch", 0.112 + 0.064),
        ("decode_reserve_first", 0.132056 + 0.064),
    ],
)
def test_kv_leaves_as_early_as_the_ticket_and_the_first_group_allow(admission: Admission, starts_s: float) -> None:
    nodes = pair(overlap="layer", layers=4, layer_groups=2, decode_blocks=9)
    load = load_plan([request("first", prompt_tokens=112), request("second", prompt_tokens=128)])
    records = by_id(simulate(run_spec(nodes, load, admission=admission)).records)
    assert records["first"].finish_s == pytest.approx(0.112 + 0.000056 + 2 * 0.010, abs=EXACT)
    assert records["second"].kv_start_s == pytest.approx(starts_s, abs=EXACT)


def test_a_ticket_within_the_step_sends_what_is_computed_then_and_the_rest_group_by_group() -> None:
    """The second prompt is computed from 0.112 to 0.512; a group takes 0.1 s, and 0.05 s on the link."""
    nodes = pair(overlap="layer", layers=4, layer_groups=4, decode_blocks=27)
    load = load_plan([request("first", prompt_tokens=112, max_tokens=16), request("second", prompt_tokens=400)])
    records = by_id(simulate(run_spec(nodes, load, payload_bytes_per_s=2e6)).records)
    free_s = records["first"].finish_s
    assert free_s == pytest.approx(0.112 + 0.014 + 15 * 0.010, abs=EXACT), "in the second group: the first one leaves"
    assert records["second"].kv_start_s == pytest.approx(free_s, abs=EXACT)
    assert records["second"].kv_ready_s == pytest.approx(0.512, abs=EXACT)
    assert records["second"].kv_end_s == pytest.approx(0.512 + 0.05, abs=EXACT)


# --- bounds ---------------------------------------------------------------------------------------------------------


@examples(200)
@given(
    prompt_tokens=st.integers(1, 3_000),
    budget=st.integers(100, 3_000),
    layers=st.integers(2, 80),
    groups=st.integers(2, 80),
    bytes_per_s=st.floats(1e4, 1e10),
    delay_s=st.sampled_from([0.0, 0.003]),
    first_token=st.sampled_from(["handoff", "recompute"]),
)
def test_layers_are_never_later_than_the_whole_prompt_and_never_faster_than_the_link(
    *,
    prompt_tokens: int,
    budget: int,
    layers: int,
    groups: int,
    bytes_per_s: float,
    delay_s: float,
    first_token: FirstToken,
) -> None:
    def served(overlap: Overlap, layer_groups: int) -> Record:
        return _alone(
            overlap,
            bytes_per_s,
            layers=layers,
            layer_groups=layer_groups,
            max_num_batched_tokens=budget,
            prompt_tokens=prompt_tokens,
            delay_s=delay_s,
            first_token=first_token,
        )

    groups = min(groups, layers)
    none, chunk, layer = served("none", 1), served("chunk", 1), served("layer", groups)
    assert ttft_s(layer) <= ttft_s(chunk) + EXACT <= ttft_s(none) + 2 * EXACT
    assert none.kv_end_s is not None
    assert layer.kv_start_s is not None
    assert layer.kv_end_s is not None
    assert layer.kv_end_s - layer.kv_start_s >= layer.kv_bytes / bytes_per_s + delay_s - EXACT
    last_bytes = layer.kv_bytes / prompt_tokens * ((prompt_tokens - 1) % budget + 1) * _last_share(layers, groups)
    assert layer.prefill_end_s is not None
    assert layer.kv_end_s >= layer.prefill_end_s + last_bytes / bytes_per_s + delay_s - EXACT


def _last_share(layers: int, groups: int) -> float:
    """What part of the layers the last group has."""
    return 1 - (groups - 1) * layers // groups / layers

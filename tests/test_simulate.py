"""The whole system in virtual time, against instants worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from emulator.core.deploy import plan_runs
from emulator.core.deployments import Deployment, Overlap, Policy, Pool, Routing
from emulator.core.quantities import BitsPerSecond, Seconds
from emulator.core.records import Record, StepRecord
from emulator.core.run_spec import NicSpec, NodeSpec, RunSpec
from emulator.core.specs import KvNetwork, Slo, Topology
from emulator.core.traffic import At, Stream, Workload
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.simulate import Simulated, Simulation, simulate
from tests.builders import by_id, gaps_s, load_plan, node_spec, pair, request, run_spec, step_times, ttft_s

EXACT = 1e-9

# --- the textbook stall: seven streams decode, one long prompt arrives ----------------------------------------------

LONG_PREFILL_S = (0.01255 * 2_000 + 1.3725e-5 * 2_000**2) / 1e3
LONG_KV_BYTES = 2 * 80 * 8 * 128 * 2 * 2_000
PAYLOAD_BYTES_PER_S = 2e12 / 8
STEP_OF_7_S, STEP_OF_8_S = (24 + 0.125 * 7) / 1e3, (24 + 0.125 * 8) / 1e3
LONG_ARRIVES_S = 1.0


def _stall(*pools: Pool) -> dict[str, Record]:
    """Seven streams that decode from 0.2 s on, and a prompt of 2,000 tokens at 1 s, on Llama-2-70B."""
    streams = (
        Stream(
            name="running",
            arrivals=At(times_s=tuple(0.03 * n for n in range(7))),
            prompt_tokens=100,
            output_tokens=60,
        ),
        Stream(name="long", arrivals=At(times_s=(LONG_ARRIVES_S,)), prompt_tokens=2_000, output_tokens=10),
    )
    topology = Topology(
        name="stall",
        model="Llama-2-70B",
        gpu="h100",
        cost="fitted",
        profile="article-70b",
        slo=Slo(),
        workload=Workload(streams=streams, duration=Seconds(2.0)),
        kv_network=KvNetwork(bandwidth=(BitsPerSecond(2e12),), rate_basis="payload"),
        deployments=(Deployment(name="stall", pools=pools),),
    )
    (run,) = plan_runs(topology, load_catalog(), plan_load(topology.workload, {}))
    records = by_id(simulate(run).records)
    assert all(record.outcome == "completed" for record in records.values())
    return records


def _gaps_after_the_long_prompt(records: dict[str, Record]) -> list[float]:
    """The gaps of the seven streams that end after the long prompt has arrived."""
    return [
        float(now - before)
        for record in records.values()
        if record.stream == "running"
        for before, now in zip(record.times(), record.times()[1:], strict=False)
        if now > LONG_ARRIVES_S
    ]


def test_a_shared_gpu_stalls_all_seven_streams_for_the_long_prefill_and_a_step() -> None:
    records = _stall(Pool(role="colocated", tp=4, policy="prefill_first"))
    gaps = _gaps_after_the_long_prompt(records)
    assert pytest.approx(0.080, abs=EXACT) == LONG_PREFILL_S
    assert max(gaps) == pytest.approx(LONG_PREFILL_S + STEP_OF_8_S, abs=EXACT)
    assert sum(gap > 0.030 for gap in gaps) == 7, "each stream once"


def test_in_a_small_chunk_budget_the_stall_is_spread_over_several_steps() -> None:
    records = _stall(Pool(role="colocated", tp=4, max_num_batched_tokens=512))
    assert 0.030 < max(_gaps_after_the_long_prompt(records)) < 0.050


def test_split_none_of_the_seven_streams_notices() -> None:
    records = _stall(Pool(role="prefill", tp=4), Pool(role="decode", tp=4))
    assert max(_gaps_after_the_long_prompt(records)) == pytest.approx(STEP_OF_8_S, abs=EXACT)


def test_split_the_long_prompt_pays_its_prefill_and_its_transfer() -> None:
    long = _stall(Pool(role="prefill", tp=4), Pool(role="decode", tp=4))["long-00000"]
    assert long.kv_bytes == LONG_KV_BYTES == 655_360_000
    assert ttft_s(long) == pytest.approx(LONG_PREFILL_S + LONG_KV_BYTES / PAYLOAD_BYTES_PER_S, abs=EXACT)
    assert long.prefill_end_s == pytest.approx(LONG_ARRIVES_S + LONG_PREFILL_S, abs=EXACT)
    assert long.kv_ready_s == long.kv_start_s == long.prefill_end_s
    assert long.kv_end_s == long.first_token_s


def test_split_the_long_prompts_first_gap_is_the_rest_of_the_running_step_and_one_more() -> None:
    records = _stall(Pool(role="prefill", tp=4), Pool(role="decode", tp=4))
    long = records["long-00000"]
    running_step_ends_s = min(
        t for r in records.values() if r.stream == "running" for t in r.times() if t > long.times()[0]
    )
    rest_s = running_step_ends_s - long.times()[0]
    assert 0 < rest_s < STEP_OF_7_S
    assert gaps_s(long)[0] == pytest.approx(rest_s + STEP_OF_8_S, abs=EXACT)
    assert 0.025 <= gaps_s(long)[0] <= 0.050


# --- time to the first token ----------------------------------------------------------------------------------------


def test_ttft_is_queue_and_prefill_and_transfer() -> None:
    run = run_spec(
        pair(),
        load_plan([request("first", prompt_tokens=500), request("second", prompt_tokens=200)]),
        payload_bytes_per_s=1e6,
        delay_s=0.002,
    )
    records = by_id(simulate(run).records)
    assert ttft_s(records["first"]) == pytest.approx(0.5 + 0.5 + 0.002, abs=EXACT)
    assert ttft_s(records["second"]) == pytest.approx(0.5 + 0.2 + 0.3 + 0.2 + 0.002, abs=EXACT), (
        "half a second behind the first prefill, and 0.3 s behind the first one's KV"
    )
    assert records["second"].prefill_start_s == pytest.approx(0.5, abs=EXACT)
    assert records["second"].kv_ready_s == pytest.approx(0.7, abs=EXACT)
    assert records["second"].kv_start_s == pytest.approx(1.0, abs=EXACT)


def test_each_direction_of_a_nic_has_its_own_rate() -> None:
    run = run_spec(pair(), load_plan([request(prompt_tokens=500)]), payload_bytes_per_s=1e6)
    assert run.link is not None
    own = {
        "prefill-0": NicSpec(egress_bps=4e6, ingress_bps=1.0),
        "decode-0": NicSpec(egress_bps=1.0, ingress_bps=2e6),
    }
    run = msgspec.structs.replace(run, link=msgspec.structs.replace(run.link, own=own))
    (record,) = simulate(run).records
    assert ttft_s(record) == pytest.approx(0.5 + 0.5e6 * 8 / 2e6, abs=EXACT)


def test_two_senders_share_the_receivers_rate() -> None:
    prefill, decode = pair()
    nodes = [prefill, node_spec("prefill-1", role="prefill"), decode]
    load = load_plan([request("a", prompt_tokens=500), request("b", prompt_tokens=500)])
    records = simulate(run_spec(nodes, load, payload_bytes_per_s=1e6)).records
    assert {record.prefill_node for record in records} == {"prefill-0", "prefill-1"}
    assert [ttft_s(record) for record in records] == pytest.approx([1.5, 1.5], abs=EXACT)


@pytest.mark.parametrize(
    ("overlap", "payload_bytes_per_s", "expected_s"),
    [
        ("none", 2e6, 4.0 + 2.0),
        ("chunk", 2e6, 4.0 + 0.5),  # three of four chunks travel while later ones are computed
        ("none", 5e5, 4.0 + 8.0),
        ("chunk", 5e5, 1.0 + 8.0),  # a slow link starts after the first chunk and is busy from then on
    ],
)
def test_overlap_hides_the_transfer_behind_later_chunks(
    overlap: Overlap, payload_bytes_per_s: float, expected_s: float
) -> None:
    nodes = pair(overlap=overlap, max_num_batched_tokens=1_000)
    load = load_plan([request(prompt_tokens=4_000)])
    (record,) = simulate(run_spec(nodes, load, payload_bytes_per_s=payload_bytes_per_s)).records
    assert ttft_s(record) == pytest.approx(expected_s, abs=EXACT)
    assert record.kv_bytes == 4_000_000
    assert record.kv_start_s == pytest.approx(1.0 if overlap == "chunk" else 4.0, abs=EXACT)
    assert record.kv_ready_s == pytest.approx(4.0, abs=EXACT), "the last byte was ready with the last chunk"


def test_a_request_for_one_token_ends_with_its_handover() -> None:
    (record,) = simulate(run_spec(pair(), load_plan([request(max_tokens=1)]), payload_bytes_per_s=1e6)).records
    assert record.token_times_s == [record.finish_s]
    assert record.finish_s == pytest.approx(0.1 + 0.1, abs=EXACT)
    assert record.kv_bytes == 100_000


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_fails_at_once_and_the_others_go_on() -> None:
    load = load_plan(
        [
            request("before", prompt_tokens=100),
            request("never", at_s=0.05, prompt_tokens=400, max_tokens=5),
            request("after", at_s=0.06, prompt_tokens=100),
        ]
    )
    records = by_id(simulate(run_spec(pair(decode_blocks=25), load)).records)
    assert (records["never"].outcome, records["never"].finish_s) == ("failed", 0.05)
    assert records["never"].reason == (
        "prompt of 400 and 5 output tokens need KV for 405 tokens, decode-0 has room for 400"
    )
    assert [records[name].outcome for name in ("before", "after")] == ["completed", "completed"]
    assert ttft_s(records["after"]) == pytest.approx(0.2 - 0.06 + 0.0001, abs=EXACT), "it waited for no refused one"


def test_while_decode_is_full_prefill_holds_its_blocks_and_later_prompts_wait() -> None:
    nodes = pair(prefill_blocks=12, decode_blocks=8)
    load = load_plan([request(f"r{n}", prompt_tokens=96, max_tokens=21) for n in range(4)])
    simulation = Simulation(run_spec(nodes, load), after_event=Simulation.check_integrity)
    records = simulation.run().records
    prefill_s, transfer_s, decode_s = 0.096, 0.000096, 20 * 0.010
    served_s = transfer_s + decode_s
    ends = [prefill_s + served_s * n for n in (1, 2, 3, 4)]
    assert [r.finish_s for r in records] == pytest.approx(ends, abs=EXACT)
    assert [r.kv_start_s for r in records] == pytest.approx([prefill_s, *ends[:3]], abs=EXACT)
    starts = [0.0, prefill_s, 2 * prefill_s, ends[0] + transfer_s]
    assert [r.prefill_start_s for r in records] == pytest.approx(starts, abs=EXACT), (
        "two prompts are held at prefill; the fourth starts when the second one's KV has arrived"
    )


def test_a_preempted_request_is_recomputed_where_it_decodes_and_loses_no_token() -> None:
    load = load_plan([request(name, prompt_tokens=96, max_tokens=60) for name in ("a", "b")])
    simulated = simulate(run_spec(pair(decode_blocks=14), load))
    first, second = simulated.records
    assert simulated.preemptions == 1
    assert [r.output_tokens for r in simulated.records] == [60, 60]
    recomputed = [step for step in simulated.steps if step.node == "decode-0" and step.prefill_tokens]
    assert len(recomputed) == 1
    assert max(gaps_s(first)) < 0.02, "the elder one runs on"
    assert max(gaps_s(second)) > 0.1
    assert second.prefill_end_s == pytest.approx(2 * 0.096, abs=EXACT), "its prefill was the first one, elsewhere"


# --- batches --------------------------------------------------------------------------------------------------------


def _table(steps: Sequence[StepRecord]) -> list[tuple[float, str, int, int]]:
    """(start in ms, kind, prompt tokens, decodes) of each step."""
    return [(round(step.start_s * 1e3, 6), step.kind, step.prefill_tokens, step.decode_batch) for step in steps]


def _batches(policy: Policy) -> list[tuple[float, str, int, int]]:
    """A request decodes; 10 ms into its prefill another with a long prompt arrives, and then a short one."""
    node = node_spec(policy=policy, max_num_batched_tokens=100, cost=step_times(prefill_base_ms=5.0))
    load = load_plan(
        [
            request("a", prompt_tokens=40, max_tokens=6),
            request("long", at_s=0.010, prompt_tokens=150, max_tokens=3),
            request("short", at_s=0.020, prompt_tokens=30, max_tokens=2),
        ]
    )
    return _table(simulate(run_spec([node], load), exact_steps=True).steps)


def test_prefill_first_runs_whole_prompts_alone_while_decodes_wait() -> None:
    assert _batches("prefill_first") == [
        (0.0, "prefill", 40, 0),
        (45.0, "prefill", 150, 0),  # larger than the budget: alone
        (200.0, "prefill", 30, 0),
        (235.0, "decode", 0, 3),
        (245.0, "decode", 0, 2),
        (255.0, "decode", 0, 1),
        (265.0, "decode", 0, 1),
        (275.0, "decode", 0, 1),
    ]


def test_chunked_fills_one_budget_with_decodes_first_and_then_prompts() -> None:
    steps = _batches("chunked")
    assert [step[1:] for step in steps] == [
        ("prefill", 40, 0),
        ("mixed", 99, 1),  # a decodes, long gets the rest of 100
        ("mixed", 81, 1),  # long's last 51, then short's 30
        ("decode", 0, 3),
        ("decode", 0, 2),  # short has its two tokens
        ("decode", 0, 1),  # long has its three
    ]
    mixed_s = ((5 + 99) ** 3.5 + 10**3.5) ** (1 / 3.5)
    assert [steps[1][0], steps[2][0]] == pytest.approx([45.0, 45.0 + mixed_s], abs=1e-6)


@pytest.mark.parametrize(
    ("routing", "nodes"),
    [
        ("round_robin", ["colocated-0", "colocated-1", "colocated-0", "colocated-1"]),
        ("least_loaded", ["colocated-0", "colocated-1", "colocated-1", "colocated-1"]),
    ],
)
def test_routing_decides_who_waits_behind_a_long_request(routing: Routing, nodes: list[str]) -> None:
    load = load_plan(
        [
            request("long", prompt_tokens=2_000, max_tokens=2),
            *(request(f"short-{n}", at_s=0.1 + 0.2 * n, prompt_tokens=50, max_tokens=2) for n in range(3)),
        ]
    )
    cluster = [node_spec("colocated-0"), node_spec("colocated-1")]
    records = simulate(run_spec(cluster, load, routing=routing)).records
    assert [record.decode_node for record in records] == nodes
    waits = [ttft_s(record) for record in records[1:]]
    assert (max(waits) > 1.0) is (routing == "round_robin")


# --- long runs, cuts and losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[node_spec(cost=step_times(decode_ms=25.0))], pair(cost=step_times(decode_ms=25.0))])
def test_a_lone_request_outlives_every_lease(nodes: Sequence[NodeSpec]) -> None:
    (record,) = simulate(run_spec(nodes, load_plan([request(max_tokens=2_401)]))).records
    assert record.outcome == "completed"
    assert gaps_s(record) == pytest.approx([0.025] * 2_400, abs=EXACT), "60 s without another word from the router"


def test_what_has_not_ended_at_the_drain_deadline_is_unfinished_and_frees_everything() -> None:
    load = load_plan(
        [request("done", max_tokens=2), request("decoding", at_s=0.1, max_tokens=500), request("late", at_s=0.96)],
        duration_s=1.0,
        drain_s=0.05,
    )
    simulation = Simulation(run_spec(pair(), load))
    records = by_id(simulation.run().records)
    assert [records[name].outcome for name in ("done", "decoding", "late")] == ["completed", "unfinished", "unfinished"]
    assert records["decoding"].reason == "not finished at 1.050 s, the drain deadline"
    assert records["decoding"].decode_node == "decode-0"
    assert records["decoding"].kv_bytes == 100_000, "its transfer happened and counts"
    assert records["decoding"].output_tokens == 85
    assert records["late"].prefill_node == "prefill-0"
    assert simulation.router.live_requests == 0
    pools = [node.engine.pool for node in simulation.nodes.values()]
    assert [pool.owners() for pool in pools] == [frozenset(), frozenset()]
    assert [pool.used_blocks for pool in pools] == [7, 12], "the steps that run still use them"


def _simulate_losing(run: RunSpec, name: str, at_s: float) -> tuple[Simulation, Simulated]:
    """A run in which the router loses a node that itself goes on without hearing of it."""
    simulation = Simulation(run, after_event=Simulation.check_integrity)
    simulation._at(at_s, lambda: simulation._route(simulation.router.lost(name)))
    return simulation, simulation.run()


def test_a_request_whose_prefill_node_is_lost_starts_again_on_another() -> None:
    prefill, decode = pair()
    nodes = [prefill, node_spec("prefill-1", role="prefill"), decode]
    run = run_spec(nodes, load_plan([request(prompt_tokens=500)]))
    simulation, simulated = _simulate_losing(run, "prefill-0", 0.2)
    (record,) = simulated.records
    assert (record.outcome, record.prefill_node, record.kv_bytes) == ("completed", "prefill-1", 500_000)
    assert ttft_s(record) == pytest.approx(0.2 + 0.5 + 0.0005, abs=EXACT)
    assert simulation.nodes["decode-0"].engine.idle


def test_a_lost_node_that_lives_on_gives_everything_up_when_its_lease_is_over() -> None:
    nodes = [node_spec("colocated-0", kv_lease_s=3.0), node_spec("colocated-1", kv_lease_s=3.0)]
    load = load_plan([request("a", max_tokens=1_000), request("b", max_tokens=1_000)])
    simulation, simulated = _simulate_losing(run_spec(nodes, load), "colocated-0", 1.005)
    assert [record.outcome for record in simulated.records] == ["failed", "completed"]
    assert simulated.records[0].reason == "node colocated-0 was lost after 91 tokens"
    last_step_s = max(step.end_s for step in simulated.steps if step.node == "colocated-0")
    assert last_step_s < 5.02, "it was heard of at 1 s; at 5 s that is more than three seconds ago"
    assert simulation.nodes["colocated-0"].engine.idle


def _kill(simulation: Simulation, name: str) -> None:
    del simulation.nodes[name]


def test_a_node_that_does_not_answer_is_lost_after_its_time() -> None:
    nodes = [node_spec("colocated-0"), node_spec("colocated-1")]
    simulation = Simulation(run_spec(nodes, load_plan([request(prompt_tokens=9_000)]), node_lost_s=2.0))
    simulation._at(0.5, partial(_kill, simulation, "colocated-0"))
    (record,) = simulation.run().records
    assert (record.outcome, record.decode_node) == ("completed", "colocated-1")
    assert record.queued_s == pytest.approx(3.0), "ticks are a second apart and its last word was at 0"

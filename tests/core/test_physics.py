"""No run beats physics: clean runs are found clean, and each law broken by hand is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest

from emulator.core.deploy import plan_runs
from emulator.core.hardware import Catalog
from emulator.core.lengths import LengthPair
from emulator.core.physics import unchecked, violations
from emulator.core.records import Record, StepRecord, expand_steps
from emulator.core.run_spec import RunSpec
from emulator.core.traffic import FixedLength
from emulator.core.workload import UserPlan, plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.topology_files import load_topology
from emulator.simulate import simulate
from tests.builders import load_plan, node_spec, pair, request, run_spec

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
LOAD = load_plan([request(f"r{i}", at_s=0.05 * i, prompt_tokens=200, max_tokens=5) for i in range(8)])
SPLIT = run_spec(pair(), LOAD, payload_bytes_per_s=2e6)
SHARED = run_spec([node_spec("colocated-0"), node_spec("colocated-1")], LOAD)

Rows = tuple[list[Record], list[StepRecord]]


def rows_of(run: RunSpec) -> Rows:
    simulated = simulate(run)
    return list(simulated.records), list(expand_steps(simulated.steps))


def user_load(*, duration_s: float = 2.0, drain_s: float = 100.0) -> RunSpec:
    lengths = LengthPair(FixedLength(tokens=100), FixedLength(tokens=4))
    users = [UserPlan("chat", n, 0.0, 0.1, lengths, seed=n) for n in range(3)]
    return run_spec(pair(), load_plan(users=users, duration_s=duration_s, drain_s=drain_s))


PROFILE = {
    "model": "Llama-3.1-8B", "gpu": "h100", "cost": "fitted", "profile": "aiconfigurator-llama-3.1-8b-h100-tp1",
}  # fmt: skip


def real_run(name: str, deployment: str, changes: Mapping[str, object] = MappingProxyType({})) -> RunSpec:
    """A run of a topology that ships, five seconds of it."""
    topology = msgspec.structs.replace(load_topology(TOPOLOGIES / f"{name}.toml"), **changes)
    workload = msgspec.structs.replace(topology.workload, duration=type(topology.workload.duration)(5.0))
    topology = msgspec.structs.replace(topology, workload=workload)
    return plan_runs(topology, load_catalog(), plan_load(workload, {}), deployments=[deployment])[0]


FIRST_TOKENS = load_plan([request(f"r{i}", prompt_tokens=100, max_tokens=1 + i % 2) for i in range(6)])
SHORT_OF_MEMORY = load_plan([request(f"r{i}", prompt_tokens=100, max_tokens=80) for i in range(6)])

CLEAN = {
    "colocated": SHARED,
    "prefill first": run_spec([node_spec(policy="prefill_first")], LOAD),
    "disaggregated": SPLIT,
    "chunks overlapped": run_spec(pair(overlap="chunk", max_num_batched_tokens=64), LOAD, payload_bytes_per_s=2e6),
    "delayed link": run_spec(pair(), LOAD, delay_s=0.01),
    "two of each": run_spec(
        [node_spec(f"{role}-{n}", role=role) for role in ("prefill", "decode") for n in (0, 1)],
        LOAD,
        payload_bytes_per_s=2e6,
    ),
    "preempted, colocated": run_spec([node_spec(kv_blocks=24)], SHORT_OF_MEMORY),
    "preempted, disaggregated": run_spec(pair(decode_blocks=24), SHORT_OF_MEMORY),
    "first token from prefill": run_spec(pair(), LOAD, payload_bytes_per_s=2e6, first_token="prefill"),
    "first tokens alone": run_spec(pair(), FIRST_TOKENS, first_token="prefill"),
    "first token recomputed": run_spec(pair(), LOAD, payload_bytes_per_s=2e6, first_token="recompute"),
    "recomputed and preempted": run_spec(pair(decode_blocks=24), SHORT_OF_MEMORY, first_token="recompute"),
    "memory first": run_spec(pair(decode_blocks=24), LOAD, admission="decode_reserve_first"),
    "prefill first, then memory": run_spec(pair(decode_blocks=24), LOAD, admission="prefill_first"),
    "users": user_load(),
    "cut at the drain": user_load(duration_s=1.0, drain_s=0.05),
    "roofline, colocated": real_run("quickstart", "colocated-chunked-512"),
    "roofline, split": real_run("quickstart", "1P1D"),
    "profile": real_run("2p1d", "2P1D", PROFILE),
}


@pytest.mark.parametrize("case", CLEAN)
def test_a_simulated_run_breaks_no_law(case: str) -> None:
    run, catalog = CLEAN[case], load_catalog()
    simulated = simulate(run)
    assert violations(run, simulated.records, simulated.steps, catalog=catalog, simulated=True) == []
    steps = list(expand_steps(simulated.steps))
    assert violations(run, simulated.records, steps, catalog=catalog) == [], "live runs are allowed more, not less"


def test_the_clean_runs_are_of_the_kinds_that_they_are_called() -> None:
    for case in ("preempted, colocated", "preempted, disaggregated", "recomputed and preempted"):
        assert simulate(CLEAN[case]).preemptions
    assert any(record.outcome == "unfinished" for record in simulate(CLEAN["cut at the drain"]).records)


# --- each law broken by hand ----------------------------------------------------------------------------------

Break = Callable[[list[Record], list[StepRecord]], Rows]


def on_records(change: Callable[[list[Record]], list[Record]]) -> Break:
    return lambda records, steps: (change(records), steps)


def first_record(**changes: object) -> Break:
    return on_records(lambda records: [msgspec.structs.replace(records[0], **changes), *records[1:]])


def last_record(change: Callable[[Record], dict[str, object]]) -> Break:
    return on_records(lambda records: [*records[:-1], msgspec.structs.replace(records[-1], **change(records[-1]))])


def on_step(kind: str, change: Callable[[StepRecord], Sequence[StepRecord]]) -> Break:
    """Replace the last step of a kind."""

    def broken(records: list[Record], steps: list[StepRecord]) -> Rows:
        row = max(n for n, step in enumerate(steps) if step.kind == kind)
        return records, [*steps[:row], *change(steps[row]), *steps[row + 1 :]]

    return broken


def changed_step(kind: str, **changes: Callable[[StepRecord], object]) -> Break:
    return on_step(
        kind, lambda step: [msgspec.structs.replace(step, **{name: of(step) for name, of in changes.items()})]
    )


def shortened(record: Record) -> dict[str, object]:
    times = record.times().tolist()[:-1]
    return {"output_tokens": len(times), "token_times_s": times}


def reversed_times(record: Record) -> dict[str, object]:
    first, *rest = record.times().tolist()
    return {"token_times_s": [first, *rest[::-1]]}


def before_arrival(record: Record) -> dict[str, object]:
    rest = record.times().tolist()[1:]
    early = record.scheduled_s - 0.5
    return {"token_times_s": [early, *rest], "first_token_s": early, "kv_end_s": early, "kv_start_s": early - 1.0}


BROKEN: dict[str, tuple[Break, str]] = {
    "a record lost": (on_records(lambda rs: rs[1:]), "r0 was planned and has no record"),
    "a record twice": (on_records(lambda rs: [*rs, rs[0]]), "r0 has 2 records"),
    "a stranger": (
        on_records(lambda rs: [*rs, msgspec.structs.replace(rs[0], request_id="x1")]),
        "x1 was never planned",
    ),
    "another prompt": (first_record(prompt_tokens=201), "r0 is not as it was planned"),
    "moved": (first_record(scheduled_s=0.01), "r0 is not as it was planned"),
    "a token short": (last_record(shortened), "r7, completed, has 4 output tokens where 5 were asked for"),
    "a token without its instant": (first_record(output_tokens=6), "r0 has 6 output tokens but the instants of 5"),
    "tokens out of order": (last_record(reversed_times), "a token of r7 came before the one that precedes it"),
    "a token before its request": (last_record(before_arrival), "the first token of r7 came 0.5 s before its arrival"),
    "another first token": (first_record(first_token_s=9.0), "the first token of r0"),
    "ended before the last token": (first_record(finish_s=0.3), "r0 ended at 0.3 s, before its last token"),
    "nowhere": (first_record(decode_node=None), "r0 completed on prefill-0 and None"),
    "overlapping steps": (
        changed_step("decode", start_s=lambda s: s.start_s - 0.001, end_s=lambda s: s.end_s - 0.001),
        "steps of one node overlap: that of decode-0",
    ),
    "a short step": (changed_step("decode", end_s=lambda s: s.end_s - 0.001), "took less time than it was planned"),
    "too much KV": (changed_step("decode", kv_blocks_used=lambda s: 1001), "more KV than the memory has"),
    "an unknown node": (changed_step("decode", node=lambda s: "decode-9"), "not part of the run has steps: decode-9"),
    "a prefill lost": (on_step("prefill", lambda s: []), "prefill-0 computed 1000 prompt tokens of 1600 needed"),
    "a decode lost": (on_step("decode", lambda s: []), "decode-0 decoded 31 tokens, its requests have 32"),
    "a decode too many": (changed_step("decode", decode_batch=lambda s: 2), "decode-0 decoded 33 tokens"),
    "a byte too many": (first_record(kv_bytes=200_001), "r0 brought 200001 bytes for a prompt of 200 tokens"),
    "a fast transfer": (
        last_record(lambda r: {"kv_start_s": (r.kv_end_s or 0.0) - 0.05}),
        "r7 brought 200000 bytes from prefill-0 to decode-0 in 0.05 s",
    ),
    "KV before its prefill": (last_record(lambda r: {"kv_start_s": 0.3}), "sent before it was computed: that of r7"),
    "a token before its KV": (
        last_record(lambda r: {"kv_end_s": (r.kv_end_s or 0.0) + 0.01}),
        "a token came before its KV: the first of r7",
    ),
}  # fmt: skip


def test_where_prefill_streams_the_first_token_the_second_must_not_come_before_its_kv() -> None:
    run = CLEAN["first token from prefill"]
    records, steps = rows_of(run)
    last = records[-1]
    assert last.kv_end_s is not None
    assert last.first_token_s is not None
    assert last.first_token_s < last.kv_end_s
    records[-1] = msgspec.structs.replace(last, kv_end_s=last.kv_end_s + 0.02)
    found = violations(run, records, steps, simulated=True)
    assert found == ["a token came before its KV: the second of r7, 0.01 s"]


def test_where_the_decode_node_makes_the_first_token_it_must_have_decoded_it() -> None:
    run = CLEAN["first token recomputed"]
    records, steps = rows_of(run)
    row = max(n for n, step in enumerate(steps) if step.kind == "decode")
    found = violations(run, records, [*steps[:row], *steps[row + 1 :]], simulated=True)
    assert any("decode-0 decoded 39 tokens, its requests have 40" in sentence for sentence in found), found


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_law_is_found(case: str) -> None:
    change, words = BROKEN[case]
    found = violations(SPLIT, *change(*rows_of(SPLIT)), simulated=True)
    assert any(words in sentence for sentence in found), found


def test_more_cases_of_one_law_are_one_sentence() -> None:
    records, steps = rows_of(SPLIT)
    found = violations(SPLIT, records[3:], steps, simulated=True)
    assert found[0] == "not every request is accounted for: r0 was planned and has no record (and 2 more)"


def test_two_transfers_at_once_are_too_much_for_a_nic_that_carries_each() -> None:
    records, steps = rows_of(SPLIT)
    one, two = records[-2:]
    assert one.kv_end_s is not None
    assert two.kv_start_s is not None
    records[-1] = msgspec.structs.replace(two, kv_start_s=one.kv_start_s, kv_end_s=one.kv_end_s, prefill_end_s=None)
    records[-1] = msgspec.structs.replace(records[-1], first_token_s=two.first_token_s)
    found = violations(SPLIT, records, steps, simulated=True)
    assert found == [
        "prefill-0 sent more KV than its NIC carries until the transfer of r7 ends",
        "decode-0 took in more KV than its NIC carries until the transfer of r7 ends",
    ]


def test_kv_in_a_run_without_a_network_is_found() -> None:
    records, steps = rows_of(SHARED)
    records[0] = msgspec.structs.replace(records[0], kv_bytes=5)
    assert violations(SHARED, records, steps) == ["KV crossed a network that the run does not have: r0"]


def test_a_users_request_that_was_left_out_is_found() -> None:
    run = user_load()
    records, steps = rows_of(run)
    left = [record for record in records if record.request_id != "chat-u01-00001"]
    assert any("user chat-u01 has" in sentence for sentence in violations(run, left, steps, simulated=True))


def test_a_live_link_may_be_off_by_its_tolerance_and_what_queues_and_no_more() -> None:
    """Transfers of 200 MB, a second each; 24 MiB of one may have waited for a receiver that woke late."""
    nodes = [msgspec.structs.replace(node, kv_bytes_per_token=1_000_000) for node in pair()]
    run = run_spec(nodes, LOAD, payload_bytes_per_s=2e8)
    records, steps = rows_of(run)

    def quicker(share: float) -> list[str]:
        faster = [
            msgspec.structs.replace(r, kv_start_s=r.kv_end_s - (r.kv_end_s - r.kv_start_s) * (1 - share))
            for r in records
            if r.kv_end_s is not None and r.kv_start_s is not None
        ]
        return violations(run, faster, steps)

    assert quicker(0.02) == []
    assert quicker(0.14) == []
    assert quicker(0.18) != []
    forced = msgspec.structs.replace(run, force=True)
    slow_link = msgspec.structs.replace(
        run, force=True, link=msgspec.structs.replace(run.link, payload_bps=1e8) if run.link else None
    )
    assert violations(forced, records, steps) == []
    assert violations(slow_link, records, steps) == [], "a forced link has no rate to keep"
    assert violations(slow_link, records, steps, simulated=True) != []


# --- peaks ----------------------------------------------------------------------------------------------------


def hurried(steps: Sequence[StepRecord], factor: float, kind: str) -> list[StepRecord]:
    """The steps of a kind `factor` times as fast."""
    return [
        msgspec.structs.replace(s, planned_s=s.planned_s / factor, end_s=s.start_s + (s.end_s - s.start_s) / factor)
        if s.kind == kind
        else s
        for s in steps
    ]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("prefill", "computes faster than the peak"), ("decode", "reads its weights faster than the memory")],
)
def test_a_step_beyond_the_gpus_peak_is_found(kind: str, words: str) -> None:
    run = CLEAN["roofline, split"]
    records, steps = rows_of(run)
    assert violations(run, records, hurried(steps, 1.1, kind), simulated=True) == [], "the model is below the peak"
    found = violations(run, records, hurried(steps, 2.5, kind), simulated=True)
    (sentence,) = [sentence for sentence in found if words in sentence]
    assert f"that of {kind}-0 at" in sentence
    assert "on 1 x l40s" in sentence


def test_rows_that_stand_for_many_steps_are_held_against_the_peak_too() -> None:
    run = CLEAN["roofline, split"]
    records, _ = rows_of(run)
    row = StepRecord(
        node="decode-0", kind="decode", start_s=50.0, end_s=50.08, planned_s=0.008, prefill_tokens=0, decode_batch=0,
        requests=0, steps=10,
    )  # fmt: skip
    simulated = simulate(run)
    found = violations(run, records, [*simulated.steps, row], simulated=True)
    assert [sentence.partition(":")[0] for sentence in found] == [
        "a step reads its weights faster than the memory of its GPUs"
    ]


def test_a_profile_is_held_against_the_gpu_that_it_names_where_it_is_known() -> None:
    run, catalog = CLEAN["profile"], load_catalog()
    records, steps = rows_of(run)
    fast = hurried(steps, 2.0, "prefill")
    (found,) = violations(run, records, fast, catalog=catalog, simulated=True)
    assert "computes faster than the peak" in found
    assert f"on 1 x h100 by profile {PROFILE['profile']}" in found
    assert unchecked(run, catalog) == []
    assert violations(run, records, fast, catalog=Catalog(), simulated=True) == []
    assert unchecked(run) == [
        "the steps of profile aiconfigurator-llama-3.1-8b-h100-tp1 were not held against a peak: no GPU h100 or no "
        "model Llama-3.1-8B is in the catalog"
    ]

"""`max_held_kv`: how much KV of its own prompts a sending node keeps before it starts no further one."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core import strict
from emulator.core.deploy import plan_runs
from emulator.core.deployments import Pool
from emulator.core.effects import Reply, RunStep
from emulator.core.engine import Engine
from emulator.core.errors import ConfigError
from emulator.core.held_kv import HeldKv
from emulator.core.kv_pool import KvPool
from emulator.core.messages import Abort, Generate, Heartbeat, Prefill, Release
from emulator.core.roles import Role
from emulator.core.scheduler import Scheduler, SchedulerConfig
from emulator.core.sequence import Sequence, Status
from emulator.core.specs import Topology
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.simulate import simulate
from tests.builders import load_plan, node_spec, pair, request, run_spec, ttft_s
from tests.engines import engine_of


def _engine(max_held_blocks: int | None, *, kv_blocks: int = 100) -> Engine:
    """Blocks of 16 tokens, 1 ms a prompt token."""
    node = node_spec("prefill-0", role="prefill", kv_blocks=kv_blocks)
    node = msgspec.structs.replace(node, max_held_blocks=max_held_blocks)
    return engine_of(node)


def _prefill(engine: Engine, name: str, blocks: int, now_s: float = 0.0) -> bool:
    """Queue a prompt of so many blocks for hand-over; whether a step starts with it."""
    effects = engine.handle(Prefill(name, 16 * blocks, 5), now_s)
    engine.check_integrity()
    return any(isinstance(effect, RunStep) for effect in effects)


def _end_step(engine: Engine) -> bool:
    """End the step that runs; whether another one starts."""
    assert engine.busy_until_s is not None
    effects = engine.step_done(engine.busy_until_s)
    engine.check_integrity()
    return any(isinstance(effect, RunStep) for effect in effects)


def _fetched(engine: Engine, name: str) -> bool:
    """The receiver has a prompt's KV; whether a step starts."""
    effects = engine.handle(Release(name), 1.0)
    engine.check_integrity()
    return any(isinstance(effect, RunStep) for effect in effects)


# --- the bound ----------------------------------------------------------------------------------------------------


def test_no_prompt_is_started_that_would_take_held_kv_above_the_bound() -> None:
    engine = _engine(10)
    assert _prefill(engine, "a", 5)
    assert not _end_step(engine)
    assert _prefill(engine, "b", 5)
    assert not _end_step(engine)
    assert engine.pool.used_blocks == engine.scheduler.held.blocks == 10
    assert not _prefill(engine, "c", 1), "90 blocks are free, but ten are held"
    assert _fetched(engine, "a")
    assert engine.scheduler.held.blocks == 5


def test_a_prompt_that_is_being_computed_counts_too() -> None:
    engine = _engine(10)
    assert _prefill(engine, "a", 6)
    _prefill(engine, "b", 5)
    assert not _end_step(engine), "b would make it eleven"
    assert _fetched(engine, "a")


def test_without_a_bound_memory_alone_decides() -> None:
    engine = _engine(None, kv_blocks=12)
    assert _prefill(engine, "a", 6)
    _prefill(engine, "b", 6)
    _prefill(engine, "c", 1)
    assert _end_step(engine)
    assert not _end_step(engine), "twelve blocks are all there are"
    assert engine.scheduler.held.blocks == 12


def test_a_prompt_larger_than_the_bound_goes_alone() -> None:
    engine = _engine(10)
    assert _prefill(engine, "a", 1)
    _end_step(engine)
    assert not _prefill(engine, "large", 30)
    assert _fetched(engine, "a")
    _prefill(engine, "b", 1)
    assert not _end_step(engine), "large is above the bound already"
    assert _fetched(engine, "large")


def test_prompts_keep_their_order_though_a_later_one_would_fit() -> None:
    engine = _engine(10)
    _prefill(engine, "a", 8)
    _end_step(engine)
    assert not _prefill(engine, "large", 5)
    assert not _prefill(engine, "small", 1)
    assert _fetched(engine, "a")
    _end_step(engine)
    assert [name for name in ("large", "small") if engine.pool.held_blocks(name)] == ["large", "small"]


def test_what_is_not_handed_over_passes_prompts_that_wait_for_the_bound() -> None:
    engine = _engine(10)
    _prefill(engine, "a", 8)
    _end_step(engine)
    assert not _prefill(engine, "b", 5)
    effects = engine.handle(Generate("local", 80, 2), 0.5)
    assert any(isinstance(effect, RunStep) for effect in effects)
    _end_step(engine)
    assert not _end_step(engine)
    assert "local" not in engine.pool.owners(), "it is served"
    assert _fetched(engine, "a")


def test_who_waits_for_the_bound_is_told_as_waiting_and_can_be_aborted() -> None:
    engine = _engine(10)
    _prefill(engine, "a", 8)
    _end_step(engine)
    _prefill(engine, "b", 5)
    beats = [e.message for e in engine.tick(1.0) if isinstance(e, Reply) and isinstance(e.message, Heartbeat)]
    assert [beat.waiting for beat in beats] == [1]
    engine.handle(Abort("b"), 1.1)
    engine.handle(Abort("a"), 1.2)
    engine.check_integrity()
    assert engine.idle


def test_an_aborted_prompt_counts_no_longer() -> None:
    engine = _engine(10)
    _prefill(engine, "a", 8)
    _prefill(engine, "b", 5)
    engine.handle(Abort("a"), 0.01)
    assert _end_step(engine), "b starts, a is gone"
    assert not _end_step(engine)
    assert engine.scheduler.held.blocks == 5


def test_a_preempted_prompt_keeps_its_place_under_the_bound_and_needs_none_to_go_on() -> None:
    """Else KV that came meanwhile could keep it back, and it the reservations that the others wait for."""
    pool = KvPool(8, 1)
    scheduler = Scheduler(SchedulerConfig("chunked", 2, 8, max_held_blocks=4), pool)
    local, prompt, later = (
        Sequence("local", 3, 6),
        Sequence("prompt", 4, 1, hand_over=True),
        Sequence("later", 1, 1, hand_over=True),
    )
    scheduler.add(local)
    scheduler.add(prompt)
    while prompt.status is not Status.PREEMPTED:
        step = scheduler.next_step()
        assert step is not None
        scheduler.complete(step)
    scheduler.add(later)
    scheduler.check_integrity()
    scheduler.remove(local, Status.FINISHED_ABORTED)
    step = scheduler.next_step()
    assert step is not None
    assert [(sequence.request_id, tokens) for sequence, tokens in step.chunks] == [("prompt", 2)]
    scheduler.complete(step)
    step = scheduler.next_step()
    assert step is not None
    assert step.chunks == ((prompt, 2),), "four blocks are the bound: later waits"
    assert list(scheduler.held_back) == []


@pytest.mark.parametrize("damage", ["held", "computing", "bound"])
def test_damage_is_noticed(damage: str) -> None:
    held = HeldKv(10)
    held.start("a", 5)
    held.start("b", 5)
    held.hold("a", 5)
    held.check_integrity()
    if damage == "held":
        held.blocks += 1
    elif damage == "computing":
        held._computing["b"] = 4
    else:
        held.max_blocks = 9
    with pytest.raises(AssertionError, match=r"block|held"):
        held.check_integrity()


def test_prefill_waits_for_the_link_where_one_prompt_fills_the_bound() -> None:
    """0.1 s to compute a prompt and 0.1 s to send it, one beside the other unless only one may be kept."""
    requests = [request(f"r{n}", prompt_tokens=100) for n in range(5)]
    prefill, decode = pair(max_num_batched_tokens=100)
    for bound, spacing_s in ((None, 0.1), (14, 0.1), (13, 0.2), (7, 0.2), (1, 0.2)):
        nodes = [msgspec.structs.replace(prefill, max_held_blocks=bound), decode]
        run = run_spec(nodes, load_plan(requests), payload_bytes_per_s=1e6)
        simulated = simulate(run)
        ttfts = [ttft_s(record) for record in simulated.records]
        assert ttfts == pytest.approx([0.2 + spacing_s * n for n in range(5)]), bound
        prefilled = [row.used_blocks for row in simulated.memory if row.node == "prefill-0"]
        assert max(prefilled) == (14 if spacing_s == 0.1 else 7)


# --- the key ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["decode", "colocated"])
def test_a_pool_that_hands_nothing_over_has_no_such_bound(role: Role) -> None:
    with pytest.raises(ConfigError, match=f"max_held_kv is for prefill and mixed pools.*{role}") as refused:
        strict.convert({"role": role, "max_held_kv": 0.5}, Pool, "lab.toml")
    assert "\n" not in str(refused.value)
    for allowed in ("prefill", "mixed"):
        assert strict.convert({"role": allowed, "max_held_kv": 0.5}, Pool, "lab.toml").max_held_kv == 0.5


def test_the_key_is_a_share_of_the_blocks_of_each_node() -> None:
    pools = [{"role": "prefill", "max_held_kv": 0.25}, {"role": "prefill", "max_held_kv": 1e-9}, {"role": "decode"}]
    stream = {"name": "chat", "arrivals": {"process": "constant", "rate_per_s": 1}, "lengths": "azure-conv-like"}
    data = {
        "name": "lab",
        "model": "Llama-3.1-8B",
        "gpu": "h100",
        "slo": {},
        "workload": {"duration": "1s", "streams": [stream]},
        "kv_network": {"bandwidth": ["10Gbps"]},
        "deployments": [{"name": "2P1D", "pools": pools}],
    }
    topology = strict.convert(data, Topology, "lab.toml")
    (run,) = plan_runs(topology, load_catalog(), plan_load(topology.workload, {}))
    assert [node.max_held_blocks for node in run.nodes] == [run.nodes[0].kv_blocks // 4, 1, None]

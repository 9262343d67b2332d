"""The bound of a goodput is one: no step is cheaper than the least costs of its tokens, whatever is in it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.bounds import Bound, Demand, LeastCosts, goodput_bound, least_costs, servable_share
from emulator.core.cost import Chunk, CostModel, FittedCost, StepShape, cost_model
from emulator.core.deployments import Policy
from emulator.core.roles import Role
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.specs import Slo
from emulator.lab.catalog_files import load_catalog
from tests.builders import load_plan, node_spec, pair, request, run_spec, step_times

CATALOG = load_catalog()
MODELS = {model.name: model for model in CATALOG.models}
GPUS = {gpu.name: gpu for gpu in CATALOG.gpus}
ROOFLINES: list[CostModel] = [
    cost_model(cost="roofline", model=MODELS[model], gpu=GPUS[gpu], tp=tp)
    for model, gpu, tp in (("Qwen2.5-7B", "l40s", 1), ("Llama-3.1-70B", "h100", 4), ("Mixtral-8x7B", "a100-80g", 2))
]
COSTS = [*ROOFLINES, *(FittedCost(profile=profile) for profile in CATALOG.profiles)]
DEMAND = Demand(np.array([100.0, 3000.0]), np.array([5.0, 200.0]))

KINDS: list[tuple[Role, Policy]] = [
    ("prefill", "chunked"), ("decode", "chunked"), ("colocated", "chunked"), ("colocated", "prefill_first"),
]  # fmt: skip


def node_of(cost: CostModel, role: Role, policy: Policy, budget: int, seats: int) -> NodeSpec:
    return node_spec(
        role=role,
        policy=policy,
        cost=cost,  # type: ignore[arg-type]
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[NodeSpec, StepShape]:
    """A node, and a step that its limits allow."""
    cost = draw(st.sampled_from(COSTS))
    role, policy = draw(st.sampled_from(KINDS))
    budget, seats = draw(st.sampled_from([64, 512, 2048])), draw(st.sampled_from([8, 256]))
    room = budget
    chunks: list[Chunk] = []
    decodes = 0
    if role != "prefill" and (role == "decode" or draw(st.booleans())):
        decodes = draw(st.integers(1, min(seats, budget)))
        room -= decodes
    mixes = role == "colocated" and policy == "chunked"
    if role == "prefill" or (role == "colocated" and (not decodes or mixes)):
        while room > 0 and len(chunks) < 3 and (draw(st.booleans()) or not (chunks or decodes)):
            tokens = draw(st.integers(1, room))
            chunks.append(Chunk(tokens, 0 if policy == "prefill_first" else draw(st.integers(0, 4000))))
            room -= tokens
    context = draw(st.integers(decodes, 2000 * decodes)) if decodes else 0
    return node_of(cost, role, policy, budget, seats), StepShape(tuple(chunks), decodes, context)


def costs_of(node: NodeSpec) -> LeastCosts:
    """Its least costs as what it is."""
    return least_costs(node, DEMAND, mixed=node.role == "colocated")


def least_s(costs: LeastCosts, shape: StepShape) -> float:
    """What the tokens of a step take at least."""
    prompts = sum(
        costs.prompt_token_s * n + costs.prompt_token2_s * ((context + n) ** 2 - context**2)
        for n, context in shape.chunks
    )
    return prompts + costs.decode_token_s * shape.decode_batch + costs.decode_context_s * shape.decode_context_sum


@given(steps())
def test_no_step_is_cheaper_than_the_least_costs_of_its_tokens(drawn: tuple[NodeSpec, StepShape]) -> None:
    node, shape = drawn
    assert node.cost.step_s(shape) >= least_s(costs_of(node), shape) * (1 - 1e-9)


@pytest.mark.parametrize("cost", ROOFLINES, ids=lambda cost: cost.model.name)
def test_a_full_step_is_as_cheap_as_the_bound_but_for_its_output_head(cost: CostModel) -> None:
    node = node_of(cost, "prefill", "chunked", 2048, 256)
    shape = StepShape((Chunk(2048, 0),), 0, 0)
    assert node.cost.step_s(shape) == pytest.approx(least_s(costs_of(node), shape), rel=0.01)


# --- shares and rates -----------------------------------------------------------------------------------------

# A prefill takes 1 ms a token, a decode step 10 ms whatever is in it: 64 seats make 0.16 ms a token.
LOAD = load_plan([request(f"r{n}", prompt_tokens=1000, max_tokens=101) for n in range(20)], drain_s=2.0)


def rate_run(slo: Slo, payload_bytes_per_s: float = 1e9) -> RunSpec:
    cost = step_times()
    run = run_spec(pair(cost=cost), LOAD, payload_bytes_per_s=payload_bytes_per_s)
    return RunSpec(**{name: getattr(run, name) for name in run.__struct_fields__} | {"slo": slo})


def demands(rate_per_s: float) -> list[Demand]:
    count = round(rate_per_s * LOAD.duration_s)
    return [Demand(np.full(count, 1000.0), np.full(count, 101.0))]


def test_the_share_that_can_be_served_is_what_fits_before_the_last_first_token() -> None:
    (demand,) = demands(2.0)
    assert servable_share(rate_run(Slo(ttft_ms=500)), demand, "prefill") == pytest.approx(10 / 20)
    assert servable_share(rate_run(Slo(ttft_ms=1500)), demand, "prefill") == pytest.approx(11 / 20)
    assert servable_share(rate_run(Slo()), demand, "prefill") == pytest.approx(12 / 20), "the drain is the limit"
    assert servable_share(rate_run(Slo()), demand, "decode") == 1.0


def test_kv_need_not_be_there_by_the_first_token_where_prefill_streams_it() -> None:
    run = rate_run(Slo(ttft_ms=500), 1e6)
    early = msgspec.structs.replace(run, router=msgspec.structs.replace(run.router, first_token="prefill"))
    demand = Demand(np.full(24, 1000.0), np.array([1.0] * 8 + [101.0] * 16))
    assert servable_share(run, demand, "KV network") == pytest.approx(10 / 24), "by 10.5 s"
    assert servable_share(early, demand, "KV network") == pytest.approx(20 / 24), "by 12 s, and 8 move none"


def test_requests_that_need_least_are_counted_first() -> None:
    mixed = Demand(np.array([10_000.0, 400.0, 500.0]), np.array([2.0, 2.0, 2.0]))
    assert servable_share(rate_run(Slo(ttft_ms=500)), mixed, "prefill") == pytest.approx(2 / 3)


@pytest.mark.parametrize(("payload_bytes_per_s", "limit"), [(1e9, "prefill"), (2e5, "KV network")])
def test_the_bound_is_the_first_rate_of_which_too_much_is_left_over(payload_bytes_per_s: float, limit: str) -> None:
    run = rate_run(Slo(ttft_ms=1000, target=0.9), payload_bytes_per_s)
    most = {"prefill": 1.1 / 0.9, "KV network": 0.2 * 1.1 / 0.9}[limit]  # requests per second, for nine of ten
    bound = goodput_bound(run, demands, start=5.0, low=0.1, high=100.0)
    assert bound is not None
    assert bound.limit == limit
    assert most < bound.rate_per_s < most * 1.3, "rates are whole numbers of requests in ten seconds"


def test_there_is_no_bound_where_even_the_highest_rate_fits() -> None:
    run = rate_run(Slo(ttft_ms=1000))
    assert goodput_bound(run, demands, start=0.5, low=0.1, high=0.9) is None
    assert isinstance(goodput_bound(run, demands, start=0.5, low=0.1, high=9.0), Bound)

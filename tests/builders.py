"""Small clusters whose every number can be worked out by hand: constant step times, round KV sizes, few blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emulator.core.cost import FittedCost
from emulator.core.deployments import Admission, Conditional, FirstToken, Overlap, Policy, RoleSwitching, Routing
from emulator.core.hardware import DecodeFit, FittedProfile
from emulator.core.records import Record
from emulator.core.roles import Role
from emulator.core.run_spec import LinkSpec, NodeSpec, RouterSpec, RunSpec
from emulator.core.specs import Scale, Slo
from emulator.core.workload import LoadPlan, PlannedRequest, UserPlan

KV_BYTES_PER_TOKEN = 1_000
ALL_OUTPUT = 16_000
"""So many reserved decode tokens are the whole output of any request here."""


def step_times(
    *,
    prefill_ms_per_token: float = 1.0,
    prefill_base_ms: float = 0.0,
    decode_ms: float = 10.0,
    decode_ms_per_sequence: float = 0.0,
) -> FittedCost:
    """A prefill takes 1 ms a token and a decode step 10 ms, unless said otherwise."""
    return FittedCost(
        profile=FittedProfile(
            name="by-hand",
            model="any",
            gpu="any",
            tp=1,
            prefill_base_ms=prefill_base_ms,
            prefill_per_token_ms=prefill_ms_per_token,
            prefill_per_token2_ms=0.0,
            decode=DecodeFit(base_ms=decode_ms, per_context_token_ms=0.0, per_sequence_ms=decode_ms_per_sequence),
            source="made up",
        )
    )


STEP_TIMES = step_times()


def node_spec(
    name: str = "colocated-0",
    *,
    role: Role = "colocated",
    cost: FittedCost = STEP_TIMES,
    policy: Policy = "chunked",
    max_num_batched_tokens: int = 2_048,
    max_num_seqs: int = 64,
    kv_blocks: int = 1_000,
    block_size: int = 16,
    max_model_len: int = ALL_OUTPUT,
    num_reserved_decode_tokens: int = 0,
    overlap: Overlap = "none",
    kv_lease_s: float = 30.0,
    layers: int = 1,
    layer_groups: int = 1,
) -> NodeSpec:
    """One node of one GPU with 1,000 KV bytes a token."""
    return NodeSpec(
        name=name,
        role=role,
        cost=cost,
        gpus=1,
        policy=policy,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_blocks=kv_blocks,
        block_size=block_size,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        max_model_len=max_model_len,
        num_reserved_decode_tokens=num_reserved_decode_tokens,
        overlap=overlap,
        kv_lease_s=kv_lease_s,
        layers=layers,
        layer_groups=layer_groups,
    )


def request(
    request_id: str = "r0", *, at_s: float = 0.0, prompt_tokens: int = 100, max_tokens: int = 3
) -> PlannedRequest:
    """A request of a stream named chat."""
    return PlannedRequest(request_id, "chat", at_s, prompt_tokens, max_tokens)


def load_plan(
    requests: Iterable[PlannedRequest] = (),
    *,
    users: Sequence[UserPlan] = (),
    duration_s: float = 10.0,
    drain_s: float = 1_000.0,
) -> LoadPlan:
    """Open requests in order of time, and closed-loop users; the drain is long enough for everything."""
    ordered = sorted(requests, key=lambda r: (r.scheduled_s, r.request_id))
    return LoadPlan(tuple(ordered), tuple(users), duration_s, drain_s)


def run_spec(
    nodes: Sequence[NodeSpec],
    load: LoadPlan,
    *,
    payload_bytes_per_s: float = 1e9,
    delay_s: float = 0.0,
    routing: Routing = "least_loaded",
    node_lost_s: float = 5.0,
    request_s: float = 10_000.0,
    scale: Scale | None = None,
    first_token: FirstToken = "handoff",
    admission: Admission = "dispatch",
    conditional: Conditional | None = None,
    role_switching: RoleSwitching | None = None,
) -> RunSpec:
    """A run of these nodes: disaggregated when one of them is not colocated, over a link of 1 GB/s each way."""
    disaggregated = any(node.role != "colocated" for node in nodes)
    bits = payload_bytes_per_s * 8
    return RunSpec(
        topology="by-hand",
        deployment="disaggregated" if disaggregated else "colocated",
        nodes=tuple(nodes),
        router=RouterSpec(
            disaggregated=disaggregated,
            routing=routing,
            node_lost_s=node_lost_s,
            request_s=request_s,
            first_token=first_token,
            admission=admission,
            conditional=conditional,
            role_switching=role_switching,
        ),
        link=LinkSpec(bandwidth_bps=bits, payload_bps=bits, delay_s=delay_s) if disaggregated else None,
        load=load,
        slo=Slo(),
        scale=scale or Scale(),
        seed=1,
        model="any",
    )


def pair(
    *,
    cost: FittedCost = STEP_TIMES,
    overlap: Overlap = "none",
    max_num_batched_tokens: int = 2_048,
    prefill_blocks: int = 1_000,
    decode_blocks: int = 1_000,
    num_reserved_decode_tokens: int = 0,
    layers: int = 1,
    layer_groups: int = 1,
) -> tuple[NodeSpec, NodeSpec]:
    """One prefill and one decode node (1P1D)."""
    prefill = node_spec(
        "prefill-0",
        role="prefill",
        cost=cost,
        overlap=overlap,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_blocks=prefill_blocks,
        layers=layers,
        layer_groups=layer_groups,
    )
    decode = node_spec(
        "decode-0",
        role="decode",
        cost=cost,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_blocks=decode_blocks,
        num_reserved_decode_tokens=num_reserved_decode_tokens,
    )
    return prefill, decode


def by_id(records: Iterable[Record]) -> dict[str, Record]:
    """Records by request id."""
    return {record.request_id: record for record in records}


def ttft_s(record: Record) -> float:
    """From the scheduled arrival to the first token, seconds."""
    assert record.first_token_s is not None, f"{record.request_id} has no token: {record.reason}"
    return record.first_token_s - record.scheduled_s


def gaps_s(record: Record) -> list[float]:
    """The gaps between a request's tokens, seconds."""
    times = record.times()
    return [float(gap) for gap in times[1:] - times[:-1]]

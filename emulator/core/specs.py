"""What a topology file says: deployments to compare, traffic, SLO, network and scale. Read, checked, frozen.

Values keep the units in which users write them (`BitsPerSecond`, `Seconds`, `Bytes` parse text with a unit);
`core.deploy` resolves them against the catalog into what processes run.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.hardware import FP16_BYTES, CostName, FittedProfile, Gpu, Model, StepTable, WeightsDtype
from emulator.core.quantities import BitsPerSecond, Bytes, Seconds, parse_span

Role = Literal["prefill", "decode", "colocated", "mixed"]
Policy = Literal["chunked", "prefill_first"]
Overlap = Literal["none", "chunk", "layer"]
TransferMode = Literal["push", "pull"]
TransferOrder = Literal["fifo", "fair"]
Preemption = Literal["recompute", "prefill"]
KvDtype = Literal["fp16", "fp8"]
KV_ELEMENT_BYTES: dict[KvDtype, int] = {"fp16": FP16_BYTES, "fp8": 1}
FirstToken = Literal["handoff", "prefill", "recompute"]
Admission = Literal["dispatch", "decode_reserve_first", "prefill_first"]
Routing = Literal["least_loaded", "round_robin"]
RateBasis = Literal["line", "payload"]
VerdictOutcome = Literal["helps", "hurts", "no difference"]
TraceFormat = Literal["azure", "burstgpt", "vidur", "splitwise", "mooncake", "bailian", "ragpulse", "aibrix"]
TimeUnit = Literal["s", "ms", "us", "ns"]
MaxContext = Literal["fail", "drop", "truncate"]

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._+-]*\Z", max_length=64)]


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything that a topology file holds: frozen, and strict about its keys."""


# --- lengths and arrivals -------------------------------------------------------------------------------------


class FixedLength(Spec, frozen=True, kw_only=True, tag_field="distribution", tag="fixed"):
    """Always `tokens`."""

    tokens: PositiveInt


class UniformLength(Spec, frozen=True, kw_only=True, tag_field="distribution", tag="uniform"):
    """Whole numbers from `low` to `high`, both included."""

    low: PositiveInt
    high: PositiveInt

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


class LognormalLength(Spec, frozen=True, kw_only=True, tag_field="distribution", tag="lognormal"):
    """Lognormal by its median and the sigma of its logarithm, clipped to low..high tokens."""

    median: PositiveFloat
    sigma: PositiveFloat
    low: PositiveInt = 1
    high: PositiveInt = 1_000_000

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


Length = FixedLength | UniformLength | LognormalLength


class Poisson(Spec, frozen=True, kw_only=True, tag_field="process", tag="poisson"):
    """Independent arrivals at `rate_per_s`."""

    rate_per_s: PositiveFloat


class Constant(Spec, frozen=True, kw_only=True, tag_field="process", tag="constant"):
    """One arrival every 1/rate_per_s seconds."""

    rate_per_s: PositiveFloat


class Gamma(Spec, frozen=True, kw_only=True, tag_field="process", tag="gamma"):
    """Gamma inter-arrivals: burstiness 1 is Poisson, below 1 burstier (CV = 1/√burstiness), as vLLM's benchmark."""

    rate_per_s: PositiveFloat
    burstiness: PositiveFloat


class At(Spec, frozen=True, kw_only=True, tag_field="process", tag="at"):
    """One arrival at each of the given times."""

    times_s: tuple[Annotated[float, msgspec.Meta(ge=0)], ...]


class ClosedLoop(Spec, frozen=True, kw_only=True, tag_field="process", tag="closed_loop"):
    """`users` who each send the next request `think_s` after the previous one has ended.

    User i of N sends the first one at i × ramp_s / N.
    """

    users: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    think_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    ramp_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class TraceOptions(Spec, frozen=True, kw_only=True):
    """How a trace file is read (null: as it shows by itself), and which of its requests are used.

    `slice` is START:END in time after the first request, END excluded and either left out at will; `limit` the most
    requests to use. What exceeds the model's context fails at the node, is left out, or is cut to fit.
    """

    format: TraceFormat | None = None
    time_unit: TimeUnit | None = None
    sort: bool = False
    slice: str | None = None
    limit: PositiveInt | None = None
    max_context: MaxContext = "fail"

    def __post_init__(self) -> None:
        if self.slice is not None:
            try:
                parse_span(self.slice)
            except ConfigError as error:
                raise ValueError(f"slice: {error}") from None


class Trace(TraceOptions, frozen=True, kw_only=True, tag_field="process", tag="trace"):
    """Replays a trace file: its times (rescaled when `rate_per_s` is given) and its lengths."""

    file: str
    rate_per_s: PositiveFloat | None = None


Arrivals = Poisson | Constant | Gamma | At | ClosedLoop | Trace


class Stream(Spec, frozen=True, kw_only=True):
    """One source of requests. Lengths come as a pair of distributions, or as one named joint set."""

    name: Name
    arrivals: Arrivals
    prompt_tokens: PositiveInt | Length | None = None
    output_tokens: PositiveInt | Length | None = None
    lengths: Literal["azure-conv-like"] | None = None

    def __post_init__(self) -> None:
        has_pair = self.prompt_tokens is not None and self.output_tokens is not None
        has_any = self.prompt_tokens is not None or self.output_tokens is not None
        if isinstance(self.arrivals, Trace):
            if has_any or self.lengths is not None:
                raise ValueError("a trace brings its own lengths: remove prompt_tokens, output_tokens, lengths")
        elif self.lengths is not None:
            if has_any:
                raise ValueError("give either lengths or prompt_tokens and output_tokens, not both")
        elif not has_pair:
            raise ValueError("prompt_tokens and output_tokens are both needed (or lengths)")


class Workload(Spec, frozen=True, kw_only=True):
    """The traffic: sources of requests over `duration`, then up to `drain` for what is still running."""

    streams: Annotated[tuple[Stream, ...], msgspec.Meta(min_length=1)]
    duration: Seconds
    drain: Seconds = Seconds(15.0)
    seed: Annotated[int, msgspec.Meta(ge=0)] = 1

    def __post_init__(self) -> None:
        names = [stream.name for stream in self.streams]
        if len(set(names)) != len(names):
            raise ValueError(f"stream names must differ, got {', '.join(names)}")
        if self.duration <= 0:
            raise ValueError("duration must be greater than 0s")


class Slo(Spec, frozen=True, kw_only=True):
    """Bounds that a request must meet, each optional; `target` is the share of sent requests that must."""

    ttft_ms: PositiveFloat | None = None
    tpot_ms: PositiveFloat | None = None
    e2el_ms: PositiveFloat | None = None
    itl_p99_ms: PositiveFloat | None = None
    target: Fraction = 0.9


class KvNetwork(Spec, frozen=True, kw_only=True):
    """The network that KV travels: each bandwidth makes one run of each disaggregated deployment.

    `bandwidth` is that of every NIC in each direction, unless a pool has its own. Each byte arrives `delay` ± `jitter`
    (uniform) after it was sent, in order.
    """

    bandwidth: Annotated[tuple[BitsPerSecond, ...], msgspec.Meta(min_length=1)]
    delay: Seconds = Seconds(0.0)
    jitter: Seconds = Seconds(0.0)
    rate_basis: RateBasis = "line"

    def __post_init__(self) -> None:
        if len(set(self.bandwidth)) != len(self.bandwidth):
            raise ValueError(f"bandwidth: the same is given twice in {', '.join(map(str, self.bandwidth))}")
        if self.jitter > self.delay:
            raise ValueError(f"jitter {self.jitter} is above delay {self.delay}; it must be at most the delay")


class Scale(Spec, frozen=True, kw_only=True):
    """`time` stretches a run k times; `bytes` sends 1/s of each buffer at 1/s of the rate."""

    time: Annotated[float, msgspec.Meta(ge=1, le=1e4)] = 1.0
    bytes: Annotated[float, msgspec.Meta(ge=1, le=1e9)] = 1.0


class Pool(Spec, frozen=True, kw_only=True):
    """Nodes of one role and make. Batch limits left out follow vLLM's defaults for the GPU.

    `kv_egress` and `kv_ingress` are what the NIC of each node sends and takes in, where it is not the KV network's.
    """

    role: Role
    nodes: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    gpu: str | None = None
    tp: PositiveInt = 1
    policy: Policy = "chunked"
    max_num_batched_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    gpu_memory_utilization: Fraction = 0.92
    block_size: PositiveInt = 16
    num_reserved_decode_tokens: Annotated[int, msgspec.Meta(ge=0)] | Literal["all"] = 512
    max_held_kv: Fraction | None = None
    kv_egress: BitsPerSecond | None = None
    kv_ingress: BitsPerSecond | None = None

    def __post_init__(self) -> None:
        if self.role == "colocated" and (self.kv_egress is not None or self.kv_ingress is not None):
            raise ValueError(
                "kv_egress and kv_ingress are for prefill, decode and mixed pools; no KV leaves a colocated one"
            )
        if self.role not in ("prefill", "mixed") and self.max_held_kv is not None:
            raise ValueError(
                f"max_held_kv is for prefill and mixed pools, whose KV others fetch; a {self.role} pool holds none"
            )
        if self.policy == "prefill_first" and self.role != "colocated":
            raise ValueError("policy prefill_first is for colocated pools; prefill, decode and mixed ones use chunked")


class Conditional(Spec, frozen=True, kw_only=True):
    """When a prompt is prefilled on the node that decodes it, and no KV moves (conditional disaggregation, as Dynamo).

    Prompts of up to `eff_isl_threshold` tokens, and any while more than `max_prefill_queue_size` requests wait for or
    are in prefill at the prefill node that would take it.
    """

    eff_isl_threshold: PositiveInt | None = None
    max_prefill_queue_size: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.eff_isl_threshold is None and self.max_prefill_queue_size is None:
            raise ValueError("give eff_isl_threshold, max_prefill_queue_size or both")


class RoleSwitching(Spec, frozen=True, kw_only=True):
    """When nodes of one pool help the other out, and do both until that is done (Splitwise's mixed pool).

    Decode nodes take prompts while more than `max_queued_prompt_tokens` are queued at every other node that may;
    prefill nodes take KV and decode while every other node that may would have given away more than `max_kv_usage` of
    its memory with the request.
    """

    max_queued_prompt_tokens: PositiveInt
    max_kv_usage: Fraction = 0.9


class Deployment(Spec, frozen=True, kw_only=True):
    """One way to serve: colocated nodes alone, or prefill, decode and mixed pools joined by the KV network.

    KV leaves in messages: one a prompt (`overlap` none), a chunk, or a group of layers of a chunk (`layer_groups` of
    them; prompts below `layer_min_tokens` whole). Each costs `message_overhead` before its first byte;
    `max_transfers_in_flight` requests have one on the way between two nodes at a time, and their bytes go one after the
    other (`fifo`) or side by side (`fair`). The prefill node sends them as they are computed (`transfer_mode` push), or
    the decode node reads a whole prompt when it has memory for it and fewer than `max_transfers_in_flight` reads from
    that node are under way (pull). A request that loses its memory on a decode node is computed again there
    (`preemption` recompute), or on a prefill node, with all its tokens so far as the prompt (prefill).
    """

    name: Name
    pools: Annotated[tuple[Pool, ...], msgspec.Meta(min_length=1)]
    kv_dtype: KvDtype = "fp16"
    overlap: Overlap = "none"
    layer_groups: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 8
    layer_min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    transfer_mode: TransferMode = "push"
    message_overhead: Seconds = Seconds(0.0)
    max_transfers_in_flight: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    transfer_order: TransferOrder = "fifo"
    first_token: FirstToken = "handoff"
    admission: Admission = "dispatch"
    preemption: Preemption = "recompute"
    conditional: Conditional | None = None
    role_switching: RoleSwitching | None = None
    routing: Routing = "least_loaded"

    def __post_init__(self) -> None:
        self._check_roles({pool.role for pool in self.pools})
        if not self.disaggregated and (self.first_token != "handoff" or self.admission != "dispatch"):
            raise ValueError("first_token and admission are for prefill and decode pools; colocated ones need neither")
        if not self.disaggregated and (self.transfer_mode != "push" or self.preemption != "recompute"):
            raise ValueError(
                "transfer_mode and preemption are for prefill and decode pools; colocated ones move no KV and "
                "recompute what they preempt"
            )
        if self.transfer_mode == "pull" and self.overlap != "none":
            raise ValueError(
                'transfer_mode = "pull" reads the KV of whole prompts: use overlap = "none", not '
                f'"{self.overlap}", or transfer_mode = "push"'
            )
        if self.layer_min_tokens and self.overlap != "layer":
            raise ValueError(f'layer_min_tokens is for overlap = "layer", not "{self.overlap}": leave it out')
        if not self.disaggregated and (
            self.message_overhead or self.max_transfers_in_flight != 1 or self.transfer_order != "fifo"
        ):
            raise ValueError(
                "message_overhead, max_transfers_in_flight and transfer_order are for prefill and decode pools; "
                "no KV leaves colocated ones"
            )
        if not self.disaggregated and (self.conditional is not None or self.role_switching is not None):
            raise ValueError(
                "conditional and role_switching are for prefill and decode pools; colocated nodes do both anyway"
            )
        if self.admission == "prefill_first" and self.overlap != "none":
            raise ValueError(
                'admission = "prefill_first" asks for decode memory when the prefill is done, so no KV can leave '
                f'before: use overlap = "none", not "{self.overlap}"'
            )

    def _check_roles(self, roles: set[Role]) -> None:
        """Some nodes must prefill, and others decode."""
        nodes = sum(pool.nodes for pool in self.pools)
        both = all(roles & {role, "mixed"} for role in ("prefill", "decode"))
        if roles != {"colocated"} and ("colocated" in roles or not both or nodes < 2):
            what = "one mixed node" if roles == {"mixed"} else f"pools of {' and '.join(sorted(roles))}"
            raise ValueError(
                f"{what}: a deployment is colocated pools alone, prefill and decode pools together, "
                "or mixed pools (of 2 nodes or more) with or without these"
            )
        if self.role_switching is not None and roles == {"mixed"}:
            raise ValueError("role_switching is for prefill and decode pools; mixed nodes do both anyway")

    @property
    def disaggregated(self) -> bool:
        """Whether KV crosses the network."""
        return any(pool.role != "colocated" for pool in self.pools)

    @property
    def gpus(self) -> int:
        """GPUs of all pools together."""
        return sum(pool.nodes * pool.tp for pool in self.pools)


class Timeouts(Spec, frozen=True, kw_only=True):
    """Deadlines, all in model seconds."""

    request: Seconds = Seconds(600.0)
    kv_lease: Seconds = Seconds(30.0)
    node_lost: Seconds = Seconds(5.0)


class Expectation(Spec, frozen=True, kw_only=True):
    """What a comparison is to show: a `sentence`, and how it can be told from the results.

    Either the verdict on `deployment` is `outcome`, or a `metric` (a key of a run's summary, such as `ttft_ms.p90`) is
    at least or at most so many times that of `against`: a deployment, by default the best colocated one. Both at the
    highest KV bandwidth that was run, or the one given.
    """

    sentence: Annotated[str, msgspec.Meta(min_length=1)]
    deployment: Name
    against: Name | None = None
    kv_bandwidth: BitsPerSecond | None = None
    outcome: VerdictOutcome | None = None
    metric: str | None = None
    at_least: PositiveFloat | None = None
    at_most: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if (self.outcome is None) == (self.metric is None):
            raise ValueError("give either an outcome or a metric")
        if (self.metric is not None) != (self.at_least is not None or self.at_most is not None):
            raise ValueError("a metric needs at_least, at_most or both; an outcome neither")


class Topology(Spec, frozen=True, kw_only=True):
    """A whole topology file."""

    name: Name
    model: str
    gpu: str
    workload: Workload
    slo: Slo
    deployments: Annotated[tuple[Deployment, ...], msgspec.Meta(min_length=1)]
    expectations: tuple[Expectation, ...] = ()
    description: str = ""
    cost: CostName = "roofline"
    profile: str | None = None
    weights: WeightsDtype = "fp16"
    kv_network: KvNetwork | None = None
    scale: Scale = Scale()
    timeouts: Timeouts = Timeouts()
    control_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    host_memory: Bytes | None = None
    max_model_len: PositiveInt | None = None
    models: tuple[Model, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    profiles: tuple[FittedProfile, ...] = ()
    tables: tuple[StepTable, ...] = ()

    def __post_init__(self) -> None:
        names = [deployment.name for deployment in self.deployments]
        if len(set(names)) != len(names):
            raise ValueError(f"deployment names must differ, got {', '.join(names)}")
        for expected in self.expectations:
            for name in (expected.deployment, expected.against):
                if name is not None and name not in names:
                    raise ValueError(f"expectations: no deployment {name!r}; there are {', '.join(names)}")
        if self.cost != "roofline" and self.profile is None:
            raise ValueError(f'cost = "{self.cost}" needs profile = "NAME"')
        if self.cost == "roofline" and self.profile is not None:
            raise ValueError('a profile needs cost = "fitted", or "table" for one of the tables')
        if self.kv_network is None and any(d.disaggregated for d in self.deployments):
            raise ValueError("a disaggregated deployment needs [kv_network] with a bandwidth")

"""The deployments of a topology file: pools of nodes, and how KV is handed over between them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emulator.core.hardware import FP16_BYTES
from emulator.core.quantities import BitsPerSecond, Seconds
from emulator.core.roles import Role, takes_in_kv
from emulator.core.spec_base import Fraction, Name, PositiveInt, Spec

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

RESERVED_DECODE_TOKENS = 512
LAYER_GROUPS = 8


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
    num_reserved_decode_tokens: Annotated[int, msgspec.Meta(ge=0)] | Literal["all"] = RESERVED_DECODE_TOKENS
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
    layer_groups: Annotated[int, msgspec.Meta(ge=2, le=1024)] = LAYER_GROUPS
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
        if not self.disaggregated and self.overlap != "none":
            raise ValueError(f'overlap = "{self.overlap}" is for prefill and decode pools; no KV leaves colocated ones')
        layers_only = (("layer_groups", LAYER_GROUPS), ("layer_min_tokens", 0))
        for key, default in layers_only:
            if self.overlap != "layer" and getattr(self, key) != default:
                raise ValueError(f'{key} is for overlap = "layer", not "{self.overlap}": leave it out')
        self._check_reserved_tokens()
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

    def _check_reserved_tokens(self) -> None:
        for pool in self.pools:
            takes_in = takes_in_kv(pool.role, switching=self.role_switching is not None)
            if pool.num_reserved_decode_tokens != RESERVED_DECODE_TOKENS and not takes_in:
                raise ValueError(
                    f"num_reserved_decode_tokens is for pools that take KV in, and a {pool.role} pool takes none: "
                    "leave it out"
                )

    def _check_roles(self, roles: set[Role]) -> None:
        """Some nodes must prefill, and others decode."""
        nodes = sum(pool.nodes for pool in self.pools)
        both = all(roles & {role, "mixed"} for role in ("prefill", "decode"))
        if roles != {"colocated"} and ("colocated" in roles or not both or nodes < 2):
            what = "one mixed node" if roles == {"mixed"} else f"pools of {' and '.join(sorted(roles))}"
            raise ValueError(
                f"{what}: a deployment is colocated pools alone, prefill and decode pools together, "
                "or mixed pools with or without these, of two nodes in all at least"
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

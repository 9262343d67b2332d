"""What processes run: one deployment at one KV bandwidth under one load.

Complete and serialisable: no process looks anything up again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from emulator.core.cost import CostModel
from emulator.core.deployments import (
    Admission,
    Conditional,
    FirstToken,
    Overlap,
    Policy,
    Preemption,
    RoleSwitching,
    Routing,
    TransferMode,
    TransferOrder,
)
from emulator.core.device_spec import DevicePlan
from emulator.core.roles import Role, sends_kv, takes_in_kv
from emulator.core.scaling import Scaling
from emulator.core.specs import Scale, Slo
from emulator.core.upkeep import Holdings, Upkeep, known_sum
from emulator.core.workload import LoadPlan


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node: its role, step times, batch limits, memory and costs. Times in model seconds, KV in model bytes.

    `upkeep` is what its GPUs cost, `weight_bytes` what all of them hold of the model's weights; a node that stands for
    no GPU has neither. Never more output is reserved than a request asks for, so `max_model_len` reserved tokens are
    its whole output.
    """

    name: str
    role: Role
    cost: CostModel
    gpus: int
    policy: Policy
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_model_len: int
    num_reserved_decode_tokens: int
    overlap: Overlap
    kv_lease_s: float
    layers: int = 1
    layer_groups: int = 1
    layer_min_tokens: int = 0
    transfer_mode: TransferMode = "push"
    max_transfers_in_flight: int = 1
    preemption: Preemption = "recompute"
    max_held_blocks: int | None = None
    kv_shards: int = 1
    reshard_s_per_byte: float = 0.0
    upkeep: Upkeep = Upkeep()
    weight_bytes: int | None = None
    min_prompt_tokens: int = 1

    def tokens_held(self, prompt_tokens: int, max_tokens: int, *, hands_over: bool) -> int:
        """For how many tokens this node must have room to serve a request; to hand its prompt over, for that alone.

        Unless the prompt is prefilled anew with what was generated, each time the node that decodes it runs out of
        memory.
        """
        prompt_alone = hands_over and self.preemption == "recompute"
        return prompt_tokens if prompt_alone else prompt_tokens + max_tokens

    @property
    def kv_capacity_bytes(self) -> int:
        """KV that fits beside the weights, that of each token counted once, also where several GPUs hold the same."""
        return self.kv_blocks * self.block_size * self.kv_bytes_per_token


class RouterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the router needs to know; times in model seconds."""

    disaggregated: bool
    routing: Routing
    node_lost_s: float
    request_s: float
    control_port: int = 0
    first_token: FirstToken = "handoff"
    admission: Admission = "dispatch"
    transfer_mode: TransferMode = "push"
    preemption: Preemption = "recompute"
    conditional: Conditional | None = None
    role_switching: RoleSwitching | None = None


class NicSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node's NIC on the KV network: payload bits per second that it sends and takes in, in model terms."""

    egress_bps: float
    ingress_bps: float


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The KV network of a run, in model terms: nominal and payload rate of each NIC, one-way delay ± jitter.

    `own` are the NICs of nodes that differ from that rate, by the node's name. Between two nodes `max_in_flight`
    requests have a message on the way at a time, in the given `order`; each message costs `message_s` (see
    `RunSpec.message_s`).
    """

    bandwidth_bps: float
    payload_bps: float
    delay_s: float
    jitter_s: float = 0.0
    own: dict[str, NicSpec] = {}
    message_s: float = 0.0
    max_in_flight: int = 1
    order: TransferOrder = "fifo"

    def nic(self, node: str) -> NicSpec:
        """A node's NIC."""
        return self.own.get(node) or NicSpec(egress_bps=self.payload_bps, ingress_bps=self.payload_bps)

    def pair_bps(self, source: str, destination: str) -> float:
        """Payload bits per second of one transfer that has both NICs to itself."""
        return min(self.nic(source).egress_bps, self.nic(destination).ingress_bps)


class MessageCost(NamedTuple):
    """Model seconds before the first byte of a message is on the wire: whatever its size, and for each model byte."""

    fixed_s: float
    s_per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """What a message of so many bytes costs."""
        return self.fixed_s + nbytes * self.s_per_byte


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run: a deployment at one KV bandwidth under one load; `force`d, it runs over links that are not as asked."""

    topology: str
    deployment: str
    nodes: tuple[NodeSpec, ...]
    router: RouterSpec
    link: LinkSpec | None
    load: LoadPlan
    slo: Slo
    scale: Scale
    seed: int
    model: str
    host_memory_bytes: int | None = None
    verify_kv: bool = False
    force: bool = False
    device: DevicePlan = DevicePlan()

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @property
    def holdings(self) -> Holdings:
        """What the deployment costs and holds, every node with weights of its own."""
        upkeep = Upkeep.total(node.upkeep for node in self.nodes)
        weight_bytes = known_sum([node.weight_bytes for node in self.nodes])
        return Holdings(
            usd_per_h=upkeep.usd_per_h,
            watts=upkeep.watts,
            weight_bytes=weight_bytes,
            weight_copies=None if weight_bytes is None else len(self.nodes),
            kv_capacity_bytes=sum(node.kv_capacity_bytes for node in self.nodes),
        )

    @property
    def first_token(self) -> FirstToken | None:
        """Who streams the first token; None where no KV is handed over."""
        return self.router.first_token if self.router.disaggregated else None

    @property
    def serves_alone(self) -> bool:
        """Whether a node may prefill and decode a request all by itself, though others would take its KV."""
        both_ways = self.router.role_switching is not None or any(node.role == "mixed" for node in self.nodes)
        return self.router.disaggregated and (both_ways or self.router.conditional is not None)

    @property
    def kv_pairs(self) -> tuple[tuple[str, str], ...]:
        """Every (sender, receiver) pair of nodes between which KV may cross the network."""
        switching = self.router.role_switching is not None
        senders = [node.name for node in self.nodes if sends_kv(node.role, switching=switching)]
        receivers = [node.name for node in self.nodes if takes_in_kv(node.role, switching=switching)]
        return tuple((sender, receiver) for sender in senders for receiver in receivers if sender != receiver)

    @property
    def kv_senders(self) -> tuple[str, ...]:
        """Nodes that KV may leave: they prefill, be it to help out, and another one decodes."""
        return tuple(dict.fromkeys(sender for sender, _ in self.kv_pairs))

    @property
    def kv_receivers(self) -> tuple[str, ...]:
        """Nodes that may take KV in: they decode, be it to help out, and another one prefills."""
        return tuple(dict.fromkeys(receiver for _, receiver in self.kv_pairs))

    def serves_without(self, lost: Collection[str]) -> bool:
        """Whether the nodes that are not `lost` can serve: one is left for each phase."""
        roles = [node.role for node in self.nodes if node.name not in lost]
        if not self.router.disaggregated:
            return bool(roles)
        switching = self.router.role_switching is not None
        prefills = any(sends_kv(role, switching=switching) for role in roles)
        return prefills and any(takes_in_kv(role, switching=switching) for role in roles)

    @property
    def kv_holders(self) -> tuple[str, ...]:
        """Nodes that keep KV in real memory: those that take it in, and with devices that compute it all of them."""
        return tuple(node.name for node in self.nodes) if self.device.computes else self.kv_receivers

    def wire_block_bytes(self, node: NodeSpec) -> int:
        """Bytes of one KV block of a node as this machine carries it."""
        return Scaling(self.scale).wire_block_bytes(node.block_size * node.kv_bytes_per_token)

    def message_s(self, source: str, destination: str, nbytes: int) -> float:
        """What a message of so many model bytes costs before its first byte is on the wire, model seconds."""
        return self.message_cost(source, destination).seconds(nbytes)

    def message_cost(self, source: str, destination: str) -> MessageCost:
        """What messages cost from one node to another.

        The configured overhead, once for each slice that one rank has to send or to read where the two nodes split KV
        over different numbers of GPUs; laying those slices out anew at the receiver; and where the receiver reads, its
        request's way to the sender.
        """
        if self.link is None:
            return MessageCost(0.0)
        by_name = {node.name: node for node in self.nodes}
        sender, receiver = by_name[source], by_name[destination]
        fixed_s, s_per_byte = self.link.message_s, 0.0
        if sender.kv_shards != receiver.kv_shards:
            few, many = sorted((sender.kv_shards, receiver.kv_shards))
            fixed_s, s_per_byte = fixed_s * -(-many // few), receiver.reshard_s_per_byte
        return MessageCost(fixed_s + (self.link.delay_s if receiver.transfer_mode == "pull" else 0.0), s_per_byte)

    @property
    def label(self) -> str:
        """Deployment and bandwidth, for progress displays and folder names."""
        if self.link is None:
            return self.deployment
        return f"{self.deployment}@{self.link.bandwidth_bps / 1e9:g}Gbps"

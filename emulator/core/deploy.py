"""From a topology and the catalog to what processes run: one `RunSpec` per deployment and KV bandwidth.

A RunSpec is complete and serialisable: no process looks anything up again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from emulator.core.catalog import extend, find_gpu, find_model, find_profile
from emulator.core.cost import CostModel, cost_model, kv_block_capacity
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.hardware import Catalog, Model
from emulator.core.pacing import payload_bits_per_s
from emulator.core.specs import Deployment, FirstToken, Overlap, Policy, Pool, Role, Routing, Scale, Slo, Topology
from emulator.core.workload import LoadPlan, stated_lengths


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node: its role, step times, batch limits and KV memory. Times in model seconds, KV in model bytes."""

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


class RouterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the router needs to know; times in model seconds."""

    disaggregated: bool
    routing: Routing
    node_lost_s: float
    request_s: float
    control_port: int = 0


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The KV network of a run, in model terms: nominal and payload rate of each NIC, one-way delay."""

    bandwidth_bps: float
    payload_bps: float
    delay_s: float


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
    first_token: FirstToken
    seed: int
    model: str
    host_memory_bytes: int | None = None
    verify_kv: bool = False
    force: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @property
    def label(self) -> str:
        """Deployment and bandwidth, for progress displays and folder names."""
        if self.link is None:
            return self.deployment
        return f"{self.deployment}@{self.link.bandwidth_bps / 1e9:g}Gbps"


def topology_catalog(topology: Topology, catalog: Catalog) -> Catalog:
    """The catalog with what the topology file brings itself."""
    return extend(catalog, models=topology.models, gpus=topology.gpus, profiles=topology.profiles)


def plan_runs(
    topology: Topology,
    catalog: Catalog,
    load: LoadPlan,
    *,
    deployments: Iterable[str] | None = None,
    verify_kv: bool = False,
    force: bool = False,
) -> list[RunSpec]:
    """Every run of a topology: each deployment (or those named), the disaggregated ones at each bandwidth.

    Raises ConfigError or CapacityError for whatever cannot work: an unknown name, weights that do not fit, a
    stated prompt beyond the context or the KV memory.
    """
    catalog = topology_catalog(topology, catalog)
    runs: list[RunSpec] = []
    for deployment in _chosen(topology, deployments):
        for link in _links(topology, deployment):
            runs.append(
                RunSpec(
                    topology=topology.name,
                    deployment=deployment.name,
                    nodes=_nodes(topology, deployment, catalog),
                    router=RouterSpec(
                        disaggregated=deployment.disaggregated,
                        routing=deployment.routing,
                        node_lost_s=float(topology.timeouts.node_lost),
                        request_s=float(topology.timeouts.request),
                        control_port=topology.control_port,
                    ),
                    link=link,
                    load=load,
                    slo=topology.slo,
                    scale=topology.scale,
                    first_token=deployment.first_token,
                    seed=topology.workload.seed,
                    model=find_model(catalog, topology.model).name,
                    host_memory_bytes=int(topology.host_memory) if topology.host_memory else None,
                    verify_kv=verify_kv,
                    force=force,
                )
            )
    _check_labels(topology, runs)
    _check_stated_lengths(topology, runs)
    return runs


def _check_labels(topology: Topology, runs: list[RunSpec]) -> None:
    """Every run has a folder named by its label beside the files of the comparison."""
    taken = {"summary.json", "report.html", "plotly.min.js"}
    for run in runs:
        if run.label in taken:
            raise ConfigError(
                f"{topology.name}: {run.label} would be the name of two results; give deployments names of their own, "
                "and bandwidths that differ in their first six digits"
            )
        taken.add(run.label)


def _chosen(topology: Topology, names: Iterable[str] | None) -> list[Deployment]:
    if names is None:
        return list(topology.deployments)
    by_name = {deployment.name: deployment for deployment in topology.deployments}
    chosen = []
    for name in names:
        if name not in by_name:
            raise ConfigError(f"{topology.name}: no deployment {name!r}; there are {', '.join(by_name)}")
        chosen.append(by_name[name])
    return chosen


def _links(topology: Topology, deployment: Deployment) -> list[LinkSpec | None]:
    network = topology.kv_network
    if not deployment.disaggregated or network is None:
        return [None]
    return [
        LinkSpec(
            bandwidth_bps=float(bandwidth),
            payload_bps=payload_bits_per_s(float(bandwidth), network.rate_basis),
            delay_s=float(network.delay),
        )
        for bandwidth in network.bandwidth
    ]


def _nodes(topology: Topology, deployment: Deployment, catalog: Catalog) -> tuple[NodeSpec, ...]:
    model = find_model(catalog, topology.model)
    nodes: list[NodeSpec] = []
    numbers: dict[Role, int] = {}
    for pool in deployment.pools:
        for _ in range(pool.nodes):
            number = numbers.get(pool.role, 0)
            numbers[pool.role] = number + 1
            nodes.append(_node(topology, deployment, pool, model=model, catalog=catalog, name=f"{pool.role}-{number}"))
    return tuple(nodes)


def _node(
    topology: Topology, deployment: Deployment, pool: Pool, *, model: Model, catalog: Catalog, name: str
) -> NodeSpec:
    gpu = find_gpu(catalog, pool.gpu or topology.gpu)
    profile = find_profile(catalog, topology.profile) if topology.profile is not None else None
    try:
        blocks = kv_block_capacity(model, gpu, pool.tp, pool.gpu_memory_utilization, pool.block_size)
    except CapacityError as error:
        raise CapacityError(f"{topology.name}, deployment {deployment.name}, {pool.role} pool: {error}") from None
    return NodeSpec(
        name=name,
        role=pool.role,
        cost=cost_model(cost=topology.cost, model=model, gpu=gpu, tp=pool.tp, profile=profile),
        gpus=pool.tp,
        policy=pool.policy,
        max_num_batched_tokens=pool.max_num_batched_tokens or gpu.max_num_batched_tokens,
        max_num_seqs=pool.max_num_seqs or gpu.max_num_seqs,
        kv_blocks=blocks,
        block_size=pool.block_size,
        kv_bytes_per_token=model.kv_bytes_per_token(),
        max_model_len=min(topology.max_model_len or model.context_tokens, model.context_tokens),
        num_reserved_decode_tokens=pool.num_reserved_decode_tokens,
        overlap=deployment.overlap,
        kv_lease_s=float(topology.timeouts.kv_lease),
    )


def _check_stated_lengths(topology: Topology, runs: list[RunSpec]) -> None:
    """Lengths that the file itself states must fit; drawn and traced ones are refused one by one during the run."""
    for stated in stated_lengths(topology.workload):
        where = f"{topology.name}: workload stream {stated.stream!r}: a prompt of {stated.prompt_tokens} tokens and "
        where += f"{stated.output_tokens} output tokens"
        for run in runs:
            for node in run.nodes:
                if stated.total_tokens > node.max_model_len:
                    raise ConfigError(f"{where} exceed the context of {run.model}, {node.max_model_len} tokens")
                room = node.kv_blocks * node.block_size
                if (stated.prompt_tokens if node.role == "prefill" else stated.total_tokens) > room:
                    raise CapacityError(
                        f"{where} do not fit the KV memory of {run.deployment}'s {node.name}, {room} tokens; "
                        "use shorter prompts, a larger GPU or more tensor parallelism"
                    )

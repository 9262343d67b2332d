"""From a topology and the catalog to what processes run: one `RunSpec` per deployment and KV bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.catalog import extend, find_gpu, find_model, find_profile, find_table
from emulator.core.cost import cost_model, kv_block_capacity, step_limits
from emulator.core.deployments import KV_ELEMENT_BYTES, Deployment, Pool
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.hardware import Catalog, FittedProfile, Model, StepTable
from emulator.core.lengths import stated_lengths, stated_shortest_prompts
from emulator.core.pacing import payload_bits_per_s
from emulator.core.roles import Role, sends_kv, takes_in_kv
from emulator.core.roofline import kv_shards, reshard_s_per_byte, weight_bytes
from emulator.core.run_spec import LinkSpec, NicSpec, NodeSpec, RouterSpec, RunSpec
from emulator.core.specs import KvNetwork, Topology
from emulator.core.upkeep import Upkeep
from emulator.core.workload import LoadPlan


def topology_catalog(topology: Topology, catalog: Catalog) -> Catalog:
    """The catalog with what the topology file brings itself."""
    return extend(
        catalog, models=topology.models, gpus=topology.gpus, profiles=topology.profiles, tables=topology.tables
    )


def context_tokens(topology: Topology, catalog: Catalog) -> int:
    """Tokens that a request may have, prompt and output together."""
    return _context_tokens(topology, find_model(topology_catalog(topology, catalog), topology.model))


def plan_runs(
    topology: Topology,
    catalog: Catalog,
    load: LoadPlan,
    *,
    deployments: Iterable[str] | None = None,
    verify_kv: bool = False,
    force: bool = False,
    calibration: CalibratedUnits | None = None,
) -> list[RunSpec]:
    """Every run of a topology: each deployment (or those named), the disaggregated ones at each bandwidth.

    `calibration` is what the file that the topology's device names says, for runs that compute.
    Raises ConfigError or CapacityError for whatever cannot work: an unknown name, weights that do not fit, a
    stated prompt beyond the context or the KV memory.
    """
    catalog = topology_catalog(topology, catalog)
    runs: list[RunSpec] = []
    for deployment in _chosen(topology, deployments):
        nodes = _nodes(topology, deployment, catalog)
        for link in _links(topology, deployment):
            runs.append(
                RunSpec(
                    topology=topology.name,
                    deployment=deployment.name,
                    nodes=nodes,
                    router=RouterSpec(
                        disaggregated=deployment.disaggregated,
                        routing=deployment.routing,
                        node_lost_s=float(topology.timeouts.node_lost),
                        request_s=float(topology.timeouts.request),
                        control_port=topology.control_port,
                        first_token=deployment.first_token,
                        admission=deployment.admission,
                        transfer_mode=deployment.transfer_mode,
                        preemption=deployment.preemption,
                        conditional=deployment.conditional,
                        role_switching=deployment.role_switching,
                    ),
                    link=link,
                    load=load,
                    slo=topology.slo,
                    scale=topology.scale,
                    seed=topology.workload.seed,
                    model=find_model(catalog, topology.model).name,
                    host_memory_bytes=int(topology.host_memory) if topology.host_memory else None,
                    verify_kv=verify_kv,
                    force=force,
                    device=topology.device.plan(calibration),
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
    if _all_nics_are_own(deployment) and len(network.bandwidth) > 1:
        raise ConfigError(
            f"{topology.name}, deployment {deployment.name}: every pool has a NIC of its own, so the "
            f"{len(network.bandwidth)} bandwidths of kv_network would make equal runs; give one bandwidth, or leave "
            "kv_egress of a pool that sends KV or kv_ingress of one that takes it in out"
        )
    return [_link(deployment, network, float(bandwidth)) for bandwidth in network.bandwidth]


def _all_nics_are_own(deployment: Deployment) -> bool:
    """Whether each pool says itself what it sends and takes in, so that the network's bandwidth says nothing."""
    switching = deployment.role_switching is not None
    return all(
        (pool.kv_egress is not None or not sends_kv(pool.role, switching=switching))
        and (pool.kv_ingress is not None or not takes_in_kv(pool.role, switching=switching))
        for pool in deployment.pools
    )


def _link(deployment: Deployment, network: KvNetwork, bandwidth_bps: float) -> LinkSpec:
    own = {
        name: NicSpec(
            egress_bps=payload_bits_per_s(float(pool.kv_egress or bandwidth_bps), network.rate_basis),
            ingress_bps=payload_bits_per_s(float(pool.kv_ingress or bandwidth_bps), network.rate_basis),
        )
        for name, pool in _named(deployment)
        if pool.kv_egress is not None or pool.kv_ingress is not None
    }
    return LinkSpec(
        bandwidth_bps=bandwidth_bps,
        payload_bps=payload_bits_per_s(bandwidth_bps, network.rate_basis),
        delay_s=float(network.delay),
        jitter_s=float(network.jitter),
        own=own,
        message_s=float(deployment.message_overhead),
        max_in_flight=deployment.max_transfers_in_flight,
        order=deployment.transfer_order,
    )


def _named(deployment: Deployment) -> list[tuple[str, Pool]]:
    """Every node's name, with its pool: role and number, counted over all pools of a role."""
    numbers: Counter[Role] = Counter()
    named = []
    for pool in deployment.pools:
        for _ in range(pool.nodes):
            named.append((f"{pool.role}-{numbers[pool.role]}", pool))
            numbers[pool.role] += 1
    return named


def _nodes(topology: Topology, deployment: Deployment, catalog: Catalog) -> tuple[NodeSpec, ...]:
    model = find_model(catalog, topology.model)
    return tuple(
        _node(topology, deployment, pool, model=model, catalog=catalog, name=name) for name, pool in _named(deployment)
    )


def _node(
    topology: Topology, deployment: Deployment, pool: Pool, *, model: Model, catalog: Catalog, name: str
) -> NodeSpec:
    gpu = find_gpu(catalog, pool.gpu or topology.gpu)
    element_bytes = KV_ELEMENT_BYTES[deployment.kv_dtype]
    cost = cost_model(
        cost=topology.cost,
        model=model,
        gpu=gpu,
        tp=pool.tp,
        profile=_profile(topology, catalog),
        kv_element_bytes=element_bytes,
        weights=topology.weights,
    )
    limits = step_limits(cost)
    try:
        blocks = kv_block_capacity(
            model,
            gpu,
            pool.tp,
            pool.gpu_memory_utilization,
            pool.block_size,
            kv_element_bytes=element_bytes,
            weights_dtype=topology.weights,
        )
    except CapacityError as error:
        raise CapacityError(f"{topology.name}, deployment {deployment.name}, {pool.role} pool: {error}") from None
    context_tokens = min(_context_tokens(topology, model), limits.max_tokens)
    reserved = pool.num_reserved_decode_tokens
    return NodeSpec(
        name=name,
        role=pool.role,
        cost=cost,
        gpus=pool.tp,
        policy=pool.policy,
        max_num_batched_tokens=limits.setting(
            "max_num_batched_tokens", pool.max_num_batched_tokens, gpu.max_num_batched_tokens
        ),
        max_num_seqs=limits.setting("max_num_seqs", pool.max_num_seqs, gpu.max_num_seqs),
        kv_blocks=blocks,
        block_size=pool.block_size,
        kv_bytes_per_token=model.kv_bytes_per_token(element_bytes),
        max_model_len=context_tokens,
        num_reserved_decode_tokens=context_tokens if reserved == "all" else reserved,
        overlap=deployment.overlap,
        kv_lease_s=float(topology.timeouts.kv_lease),
        layers=model.layers,
        layer_groups=_layer_groups(topology, deployment, model),
        layer_min_tokens=deployment.layer_min_tokens,
        transfer_mode=deployment.transfer_mode,
        max_transfers_in_flight=deployment.max_transfers_in_flight,
        preemption=deployment.preemption,
        max_held_blocks=None if pool.max_held_kv is None else max(1, int(blocks * pool.max_held_kv)),
        kv_shards=kv_shards(model, pool.tp),
        reshard_s_per_byte=reshard_s_per_byte(model, gpu, pool.tp),
        upkeep=Upkeep.of_gpus(gpu, pool.tp),
        weight_bytes=round(weight_bytes(model, topology.weights)),
        min_prompt_tokens=limits.min_prompt_tokens,
    )


def _context_tokens(topology: Topology, model: Model) -> int:
    return min(topology.max_model_len or model.context_tokens, model.context_tokens)


def _profile(topology: Topology, catalog: Catalog) -> FittedProfile | StepTable | None:
    if topology.profile is None:
        return None
    find = find_table if topology.cost == "table" else find_profile
    return find(catalog, topology.profile)


def _layer_groups(topology: Topology, deployment: Deployment, model: Model) -> int:
    if deployment.overlap != "layer":
        return 1
    if deployment.layer_groups > model.layers:
        raise ConfigError(
            f"{topology.name}, deployment {deployment.name}: layer_groups {deployment.layer_groups} is above the "
            f"{model.layers} layers of {model.name}"
        )
    return deployment.layer_groups


def _check_stated_lengths(topology: Topology, runs: list[RunSpec]) -> None:
    """Lengths that the file itself states must fit; drawn and traced ones are refused one by one during the run."""
    for stream, prompt_tokens in stated_shortest_prompts(topology.workload):
        for node in (node for run in runs for node in run.nodes):
            if below := step_limits(node.cost).below(prompt_tokens):
                raise ConfigError(
                    f"{topology.name}: workload stream {stream!r}: a prompt of {prompt_tokens} tokens {below}"
                )
    for stated in stated_lengths(topology.workload):
        where = f"{topology.name}: workload stream {stated.stream!r}: a prompt of {stated.prompt_tokens} tokens and "
        where += f"{stated.output_tokens} output tokens"
        for run in runs:
            for node in run.nodes:
                if beyond := step_limits(node.cost).beyond(stated.total_tokens):
                    raise ConfigError(f"{where} {beyond}")
                if stated.total_tokens > node.max_model_len:
                    raise ConfigError(f"{where} exceed the context of {run.model}, {node.max_model_len} tokens")
                room = node.kv_blocks * node.block_size
                prefills = node.role == "prefill"
                if node.tokens_held(stated.prompt_tokens, stated.output_tokens, hands_over=prefills) > room:
                    raise CapacityError(
                        f"{where} do not fit the KV memory of {run.deployment}'s {node.name}, {room} tokens; "
                        "use shorter prompts, a larger GPU or more tensor parallelism"
                    )

"""Every way in which a number of GPUs could serve a topology's model: colocated, and each split into two pools.

Nodes are as those of the topology's own pools, so their tensor parallelism, memory use and NICs are the user's choice;
only how many there are, of which GPUs, and the colocated batch policy vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from emulator.core.catalog import find_gpu
from emulator.core.deploy import topology_catalog
from emulator.core.deployments import Deployment, Pool
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.hardware import Catalog
from emulator.core.plan import Contender, Impossible, PlannedPool
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.study.rated_runs import Candidate, base_run
from emulator.study.variants import MOST_NODES, Ratio, deployment_of, pool_of, with_deployments

BUDGETS = (256, 512, 1024, 2048)
"""Tokens a step that colocated nodes are tried with, beside the default of their GPU and the topology's own."""

Makes = tuple[Pool, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """A contender that fits: its deployment, and its run under the topology's own load."""

    contender: Contender
    topology: Topology
    base: RunSpec


def contenders(
    topology: Topology, catalog: Catalog, traces: Mapping[str, Trace], gpus: int, gpu_types: Sequence[str] = ()
) -> tuple[list[Fit], list[Impossible]]:
    """Everything that `gpus` GPUs can be, in whole nodes, on each of `gpu_types` or each pair of them.

    Without `gpu_types`, GPUs are the topology's. The topology has one KV bandwidth. Raises ConfigError when the number
    is none that can be, a type is unknown, or nothing at all is possible, with the first reason.
    """
    if not 1 <= gpus <= MOST_NODES:
        raise ConfigError(f"--gpus {gpus}: must be from 1 to {MOST_NODES}")
    own = topology_catalog(topology, catalog)
    types = [find_gpu(own, name).name for name in gpu_types]
    fits: list[Fit] = []
    impossible: list[Impossible] = []
    for deployment in (*_colocated(topology, own, gpus, types), *_splits(topology, gpus, types)):
        if isinstance(deployment, Impossible):
            impossible.append(deployment)
            continue
        try:
            alone = with_deployments(topology, [deployment])
            bandwidths = topology.kv_network.bandwidth if topology.kv_network and deployment.disaggregated else (None,)
            base = base_run(alone, catalog, traces, Candidate(deployment.name, bandwidths[0]))
        except (ConfigError, CapacityError) as error:
            impossible.append(Impossible(deployment=deployment.name, reason=_without_place(str(error))))
            continue
        fits.append(Fit(Contender(deployment=deployment.name, pools=_planned(topology, own, deployment)), alone, base))
    if not fits:
        raise CapacityError(f"{topology.name} on {gpus} GPUs: {impossible[0].deployment}: {impossible[0].reason}")
    return fits, impossible


def _without_place(message: str) -> str:
    """What is wrong, without topology, deployment and pool, which the reader of a plan knows."""
    return message.rpartition(" pool: ")[2]


# --- deployments ----------------------------------------------------------------------------------------------


def _colocated(
    topology: Topology, catalog: Catalog, gpus: int, types: Sequence[str]
) -> Iterator[Deployment | Impossible]:
    """Colocated nodes with each chunk budget, and prefill-first."""
    pattern = pool_of(topology, "colocated")
    tps = sorted({pool.tp for deployment in topology.deployments for pool in deployment.pools})
    for tp, gpu in itertools.product(tps, types or (pattern.gpu,)):
        tag = _tag([gpu] if len(types) > 1 else [], [tp] if len(tps) > 1 else [])
        if gpus % tp:
            reason = f"{gpus} GPUs do not make whole nodes of {tp} (tp); a multiple of {tp} would"
            yield Impossible(deployment=f"colocated{tag}", reason=reason)
            continue
        pool = msgspec.structs.replace(pattern, gpu=gpu, tp=tp, policy="chunked")
        ratio = Ratio(colocated=gpus // tp)
        own = pattern.max_num_batched_tokens
        default = find_gpu(catalog, gpu or topology.gpu).max_num_batched_tokens
        for budget in sorted({*BUDGETS, default, own or default}):
            chunked = msgspec.structs.replace(pool, max_num_batched_tokens=budget)
            yield _named(deployment_of(topology, ratio, colocated=chunked), f"{ratio}-{budget}{tag}")
        whole = msgspec.structs.replace(pool, policy="prefill_first")
        yield _named(deployment_of(topology, ratio, colocated=whole), f"{ratio}-prefill-first{tag}")


def _splits(topology: Topology, gpus: int, types: Sequence[str]) -> Iterator[Deployment | Impossible]:
    """Every xPyD that uses all GPUs, in each make of the topology's disaggregated deployments."""
    makes = _split_makes(topology)
    for (prefill, decode), pair in itertools.product(makes, _pairs(types)):
        gpu_names = [] if len(types) < 2 else list(dict.fromkeys(pair))
        tps = [prefill.tp, decode.tp] if len(makes) > 1 else []
        tag = _tag(gpu_names, tps if prefill.tp != decode.tp else tps[:1])
        counts = [
            (x, (gpus - x * prefill.tp) // decode.tp)
            for x in range(1, gpus // prefill.tp + 1)
            if gpus > x * prefill.tp and (gpus - x * prefill.tp) % decode.tp == 0
        ]
        if not counts:
            reason = f"{gpus} GPUs do not make whole nodes of {prefill.tp} (prefill) and {decode.tp} (decode)"
            yield Impossible(deployment=f"xPyD{tag}", reason=reason)
        for x, y in counts:
            ratio = Ratio(prefill=x, decode=y)
            made = deployment_of(
                topology,
                ratio,
                prefill=msgspec.structs.replace(prefill, gpu=pair[0] or prefill.gpu),
                decode=msgspec.structs.replace(decode, gpu=pair[1] or decode.gpu),
            )
            yield _named(made, f"{ratio}{tag}")


def _split_makes(topology: Topology) -> list[Makes]:
    """Prefill and decode pools as the topology has them, one pair for each two degrees of tensor parallelism."""
    makes: dict[tuple[int, int], Makes] = {}
    for deployment in topology.deployments:
        prefill = next((pool for pool in deployment.pools if pool.role == "prefill"), None)
        decode = next((pool for pool in deployment.pools if pool.role == "decode"), None)
        if prefill is not None and decode is not None:
            makes.setdefault((prefill.tp, decode.tp), (prefill, decode))
    return list(makes.values()) or [(pool_of(topology, "prefill"), pool_of(topology, "decode"))]


def _pairs(types: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """GPUs of the prefill and the decode pool; None for the topology's own."""
    if types:
        yield from itertools.product(types, types)
    else:
        yield None, None


def _named(deployment: Deployment, name: str) -> Deployment:
    return msgspec.structs.replace(deployment, name=name)


def _tag(gpu_names: Sequence[str | None], tps: Sequence[int]) -> str:
    """What a name needs beside the ratio where several GPUs or degrees of tensor parallelism are in question."""
    parts = ["+".join(name for name in gpu_names if name), "+".join(f"tp{tp}" for tp in tps)]
    return "".join(f"-{part}" for part in parts if part)


def _planned(topology: Topology, catalog: Catalog, deployment: Deployment) -> tuple[PlannedPool, ...]:
    """The pools for a reader, with what their GPUs cost and draw."""
    planned = []
    for pool in deployment.pools:
        gpu = find_gpu(catalog, pool.gpu or topology.gpu)
        number = pool.nodes * pool.tp
        price = gpu.price_usd_per_h
        planned.append(
            PlannedPool(
                role=pool.role,
                nodes=pool.nodes,
                gpu=gpu.name,
                tp=pool.tp,
                policy=pool.policy,
                max_num_batched_tokens=pool.max_num_batched_tokens or gpu.max_num_batched_tokens,
                price_usd_per_h=None if price is None else number * price,
                tdp_w=number * gpu.tdp_w,
            )
        )
    return tuple(planned)

"""Variants of a topology: other pool ratios, chunk budgets, rates, bandwidths, seeds and lengths, all else as it is.

What a sweep, a break-even search or a plan runs is always made here, so that the three mean the same by `2P2D`, by
`4C` or by a prompt of 4,000 tokens. Whatever cannot be is a ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from emulator.core import traffic
from emulator.core.deployments import Deployment, KvDtype, Pool
from emulator.core.errors import ConfigError
from emulator.core.lengths import LengthPair, Lengths
from emulator.core.quantities import BitsPerSecond
from emulator.core.roles import Role
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.core.workload import LoadPlan, plan_load, scale_rate

MOST_NODES = 256
"""Of one pool, as `deployments.Pool` has it."""

_RATIO = re.compile(r"(?P<prefill>[0-9]+)P(?P<decode>[0-9]+)D|(?P<colocated>[0-9]+)C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many nodes each role has: prefill and decode together, or colocated alone. Written `2P2D`, `4C`."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    def __str__(self) -> str:
        return f"{self.colocated}C" if self.colocated else f"{self.prefill}P{self.decode}D"

    @property
    def disaggregated(self) -> bool:
        """Whether it splits prefill from decode."""
        return not self.colocated

    def nodes(self, role: Role) -> int:
        """Nodes of a role."""
        return {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}.get(role, 0)


def parse_ratio(text: str) -> Ratio:
    """Read `2P2D` or `4C`; raises ConfigError for anything else."""
    match = _RATIO.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{text.strip()!r} is not a ratio: write xPyD, such as 2P2D, or NC for N colocated nodes, such as 4C"
        )
    counts = {role: int(number) for role, number in match.groupdict().items() if number is not None}
    if not all(1 <= number <= MOST_NODES for number in counts.values()):
        raise ConfigError(f"{text.strip()!r} is not a ratio: each number of nodes must be from 1 to {MOST_NODES}")
    return Ratio(**counts)


# --- deployments ----------------------------------------------------------------------------------------------


def pool_of(topology: Topology, role: Role) -> Pool:
    """The topology's first pool of a role; where there is none, a pool of the make of its first, limits left open."""
    pools = [pool for deployment in topology.deployments for pool in deployment.pools]
    for pool in pools:
        if pool.role == role:
            return pool
    make = pools[0]
    return Pool(
        role=role,
        gpu=make.gpu,
        tp=make.tp,
        gpu_memory_utilization=make.gpu_memory_utilization,
        block_size=make.block_size,
    )


def deployment_of(
    topology: Topology,
    ratio: Ratio,
    *,
    prefill: Pool | None = None,
    decode: Pool | None = None,
    colocated: Pool | None = None,
) -> Deployment:
    """The deployment of a ratio, called as it is written: nodes as those of the pools given, else of the topology's.

    How KV goes out, requests are routed and first tokens are sent is as in the topology's first deployment of the
    kind without mixed nodes. Give `prefill` and `decode` pools of different GPUs for a heterogeneous one.
    """
    patterns = _patterns(topology, ratio)
    given = {"prefill": prefill, "decode": decode, "colocated": colocated}
    roles: tuple[Role, ...] = ("prefill", "decode") if ratio.disaggregated else ("colocated",)
    pools = tuple(
        msgspec.structs.replace(given[role] or pool_of(topology, role), role=role, nodes=ratio.nodes(role))
        for role in roles
    )
    if not patterns:
        return Deployment(name=str(ratio), pools=pools, kv_dtype=topology.deployments[0].kv_dtype)
    return msgspec.structs.replace(patterns[0], name=str(ratio), pools=pools)


def _patterns(topology: Topology, ratio: Ratio) -> list[Deployment]:
    """The topology's deployments that have the roles of a ratio."""
    return [
        d
        for d in topology.deployments
        if d.disaggregated == ratio.disaggregated and all(pool.role != "mixed" for pool in d.pools)
    ]


def deployments_like(topology: Topology, ratio: Ratio) -> tuple[Deployment, ...]:
    """A ratio in every make that the topology has: one deployment for each of its own of that kind.

    `4C` of a topology with two colocated deployments gives `4C-` and their names; where there is only one to be
    like, the ratio is the name. Those with mixed nodes are of no kind that a ratio can say. Raises ConfigError for a
    pattern with two pools of a role.
    """
    patterns = _patterns(topology, ratio)
    if not patterns:
        return (deployment_of(topology, ratio),)
    made = []
    for pattern in patterns:
        roles = [pool.role for pool in pattern.pools]
        if len(set(roles)) != len(roles):
            raise ConfigError(
                f"{topology.name}, deployment {pattern.name}: has several pools of one role, so {ratio} does not say "
                "how many nodes each has; use a deployment with one pool a role"
            )
        pools = tuple(msgspec.structs.replace(pool, nodes=ratio.nodes(pool.role)) for pool in pattern.pools)
        name = str(ratio) if len(patterns) == 1 else f"{ratio}-{pattern.name}"
        made.append(msgspec.structs.replace(pattern, name=name, pools=pools))
    return tuple(made)


def chunked_deployment(pool: Pool, budget: int, *, gpus: int, name: str, kv_dtype: KvDtype = "fp16") -> Deployment:
    """Colocated nodes like those of `pool`, chunked, with a budget of `budget` tokens a step, on `gpus` GPUs in all.


    Raises ConfigError when the GPUs do not make whole nodes.
    """
    if gpus % pool.tp:
        raise ConfigError(f"{gpus} GPUs cannot be divided into colocated nodes of {pool.tp} GPUs (tp)")
    chunked = msgspec.structs.replace(
        pool,
        role="colocated",
        nodes=gpus // pool.tp,
        policy="chunked",
        max_num_batched_tokens=budget,
        kv_egress=None,
        kv_ingress=None,
    )
    return Deployment(name=name, pools=(chunked,), kv_dtype=kv_dtype)


def with_deployments(topology: Topology, deployments: Sequence[Deployment]) -> Topology:
    """The topology with other deployments."""
    names = [deployment.name for deployment in deployments]
    if not names:
        raise ConfigError(f"{topology.name}: no deployment is left; give at least one")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{topology.name}: deployment {twice[0]} is there twice; give each once")
    if topology.kv_network is None:
        for deployment in deployments:
            if deployment.disaggregated:
                raise ConfigError(
                    f"{topology.name}: {deployment.name} is disaggregated, which needs [kv_network] with a bandwidth"
                )
    return msgspec.structs.replace(topology, deployments=tuple(deployments), expectations=())


def chosen_deployments(topology: Topology, names: Sequence[str]) -> tuple[Deployment, ...]:
    """The deployments of these names, in the topology's order; raises ConfigError for one that it has not."""
    known = {deployment.name: deployment for deployment in topology.deployments}
    for name in names:
        if name not in known:
            raise ConfigError(f"{topology.name}: no deployment {name!r}; there are {', '.join(known)}")
    return tuple(deployment for name, deployment in known.items() if name in names)


# --- network and traffic --------------------------------------------------------------------------------------


def with_bandwidths(topology: Topology, bandwidths: Sequence[float]) -> Topology:
    """The topology with these bandwidths of its KV network, bits per second; ConfigError where it has none."""
    if topology.kv_network is None:
        raise ConfigError(f"{topology.name}: has no [kv_network], so no KV crosses a network in it; add one")
    rates = tuple(BitsPerSecond(bandwidth) for bandwidth in bandwidths)
    network = msgspec.structs.replace(topology.kv_network, bandwidth=rates)
    return msgspec.structs.replace(topology, kv_network=network)


def with_rate(topology: Topology, rate_per_s: float, traces: Mapping[str, Trace]) -> Topology:
    """The topology at another total rate of its open-loop streams, all in proportion; see `scale_rate`."""
    return msgspec.structs.replace(topology, workload=scale_rate(topology.workload, rate_per_s, traces))


def with_seed(topology: Topology, seed: int) -> Topology:
    """The topology with another seed of its traffic."""
    return msgspec.structs.replace(topology, workload=msgspec.structs.replace(topology.workload, seed=seed))


def check_fixed_lengths(workload: traffic.Workload, option: str) -> None:
    """Raise ConfigError, naming `option`, for traffic to which fixed lengths cannot be given."""
    open_streams = [stream for stream in workload.streams if not isinstance(stream.arrivals, traffic.ClosedLoop)]
    for stream in open_streams:
        if isinstance(stream.arrivals, traffic.Trace):
            raise ConfigError(
                f"{option}: stream {stream.name} replays a trace, whose lengths are its own; leave the option out, or "
                "use a stream with lengths"
            )
    if not open_streams:
        raise ConfigError(f"{option}: every stream is closed-loop, and only open-loop streams get fixed lengths")


def with_prompt_tokens(load: LoadPlan, tokens: int) -> LoadPlan:
    """The same open-loop requests, each with a prompt of `tokens`; those of closed-loop users stay as they are."""
    requests = (msgspec.structs.replace(request, prompt_tokens=tokens) for request in load.open)
    return msgspec.structs.replace(load, open=tuple(requests))


def with_output_tokens(load: LoadPlan, tokens: int) -> LoadPlan:
    """The same open-loop requests, each with `tokens` output tokens; those of closed-loop users stay as they are."""
    requests = (msgspec.structs.replace(request, max_tokens=tokens) for request in load.open)
    return msgspec.structs.replace(load, open=tuple(requests))


def load_of(
    topology: Topology,
    traces: Mapping[str, Trace],
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
) -> LoadPlan:
    """The topology's requests, those of open-loop streams with a fixed prompt or output length where one is given."""
    load = plan_load(topology.workload, traces)
    if prompt_tokens is not None:
        load = with_prompt_tokens(load, prompt_tokens)
    return load if output_tokens is None else with_output_tokens(load, output_tokens)


def useful_seeds(
    topology: Topology,
    count: int,
    traces: Mapping[str, Trace],
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
) -> tuple[int, ...]:
    """The workload's seed and the next ones, `count` of them; the first alone where nothing depends on it.

    Equal runs counted as several would make any difference between deployments look certain.
    """
    seeds = tuple(range(topology.workload.seed, topology.workload.seed + count))
    if count == 1 or (topology.kv_network is not None and topology.kv_network.jitter > 0):
        return seeds
    first, second = (
        _what_is_sent(
            load_of(with_seed(topology, seed), traces, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        )
        for seed in seeds[:2]
    )
    return seeds if first != second else seeds[:1]


def _what_is_sent(load: LoadPlan) -> LoadPlan:
    """The load without the seeds of users who draw nothing."""
    return msgspec.structs.replace(
        load, users=tuple(msgspec.structs.replace(u, seed=0) if _is_fixed(u.lengths) else u for u in load.users)
    )


def _is_fixed(lengths: Lengths) -> bool:
    return isinstance(lengths, LengthPair) and all(
        isinstance(length, traffic.FixedLength) for length in (lengths.prompt, lengths.output)
    )

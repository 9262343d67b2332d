"""What a topology file says: deployments to compare, traffic, SLO, network and scale. Read, checked, frozen.

Values keep the units in which users write them (`BitsPerSecond`, `Seconds`, `Bytes` parse text with a unit);
`core.deploy` resolves them against the catalog into what processes run.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emulator.core.deployments import Deployment
from emulator.core.device_spec import DeviceSpec
from emulator.core.hardware import CostName, FittedProfile, Gpu, Model, StepTable, WeightsDtype
from emulator.core.quantities import BitsPerSecond, Bytes, Seconds
from emulator.core.spec_base import Fraction, Name, PositiveFloat, PositiveInt, Spec
from emulator.core.traffic import Workload

RateBasis = Literal["line", "payload"]
VerdictOutcome = Literal["helps", "hurts", "no difference"]


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
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least:g} is above at_most {self.at_most:g}: nothing can be both")


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
    device: DeviceSpec = DeviceSpec()
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

"""Options of `pdemu bench`, named as those of `vllm bench serve`, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from emulator.cli.options import TraceFlags, Traffic, read_topology
from emulator.core import traffic
from emulator.core.bench.arrivals import Pace, RampUp, RampUpStrategy
from emulator.core.bench.measures import Measures, parse_goodput, parse_latencies, parse_percentiles
from emulator.core.bench.plan import DEFAULT_NUM_PROMPTS, lengths_plan, topology_plan, trace_plan
from emulator.core.errors import ConfigError
from emulator.core.trace import Trace, check_rate
from emulator.core.workload import LoadPlan
from emulator.lab.catalog_files import load_catalog
from emulator.lab.topology_files import load_trace, load_traces

INPUT_LEN, OUTPUT_LEN = 1024, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags(TraceFlags):
    """What is sent, how fast, and what is made of it; as typed."""

    topology: Annotated[
        Path | None, typer.Option("--topology", metavar="FILE", help="Send this topology's traffic (TOML).")
    ] = None
    input_len: Annotated[
        int | None, typer.Option("--input-len", metavar="N", help=f"Prompt tokens of each request [{INPUT_LEN}].")
    ] = None
    output_len: Annotated[
        int | None, typer.Option("--output-len", metavar="N", help=f"Output tokens of each request [{OUTPUT_LEN}].")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="TOKENS", help="The context, for --max-context.")
    ] = None
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts", metavar="N", help=f"Requests to send [{DEFAULT_NUM_PROMPTS}; of a trace or topology: all]."
        ),
    ] = None
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", metavar="N", help="Requests to send before, which do not count.")
    ] = 0
    request_rate: Annotated[
        float,
        typer.Option(
            "--request-rate", metavar="N", help="Requests per second; inf: all at once, or at a trace's own pace."
        ),
    ] = math.inf
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness", metavar="SHAPE", help="Shape of gamma gaps; 1: Poisson, less: burstier, inf: even."
        ),
    ] = 1.0
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", metavar="N", help="At most N requests at a time; others wait.")
    ] = None
    ramp_up_strategy: Annotated[
        RampUpStrategy | None, typer.Option("--ramp-up-strategy", help="Let the rate grow from the first request on.")
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, typer.Option("--ramp-up-start-rps", metavar="N", help="The rate of the first request.")
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, typer.Option("--ramp-up-end-rps", metavar="N", help="The rate of the last request.")
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            metavar="NAME:MS",
            help="Bounds of a good request, such as ttft:200 tpot:50; also e2el and itl_p99.",
        ),
    ] = None
    percentile_metrics: Annotated[
        str, typer.Option("--percentile-metrics", metavar="NAME,…", help="Latencies to report.")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[
        str, typer.Option("--metric-percentiles", metavar="N,…", help="Their percentiles.")
    ] = "99"
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Seed of all that is random (default: 0, or the topology's)."),
    ] = None

    def pace(self) -> Pace:
        """How fast requests are sent."""
        if not math.isinf(self.request_rate) or self.request_rate < 0:
            check_rate(self.request_rate, f"--request-rate {self.request_rate:g}")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness {self.burstiness:g}: must be above 0")
        return Pace(self.request_rate, self.burstiness, self._ramp_up())

    def _ramp_up(self) -> RampUp | None:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ConfigError("--ramp-up-start-rps, --ramp-up-end-rps: give --ramp-up-strategy too")
            return None
        if start is None or end is None:
            raise ConfigError("--ramp-up-strategy: give --ramp-up-start-rps and --ramp-up-end-rps too")
        if not 0 < start <= end < math.inf:
            raise ConfigError(f"--ramp-up-start-rps {start:g}, --ramp-up-end-rps {end:g}: 0 < start <= end is needed")
        if math.isfinite(self.request_rate):
            raise ConfigError("--request-rate: the rate is that of --ramp-up-strategy; leave one of the two out")
        return RampUp(self.ramp_up_strategy, start, end)

    def measures(self, more_bounds: Sequence[str]) -> Measures:
        """What is made of the run; `more_bounds` follow the one that `--goodput` takes."""
        if more_bounds and not self.goodput:
            raise ConfigError(f"{more_bounds[0]}: is no option; the server is given by --url URL")
        return Measures(
            slo=parse_goodput([*(self.goodput or ()), *more_bounds]),
            latencies=parse_latencies(self.percentile_metrics),
            percentiles=parse_percentiles(self.metric_percentiles),
        )

    def check(self) -> None:
        """Refuse numbers that cannot be."""
        at_least: dict[str, tuple[int | None, int]] = {
            "--num-prompts": (self.num_prompts, 1),
            "--num-warmups": (self.num_warmups, 0),
            "--max-concurrency": (self.max_concurrency, 1),
            "--input-len": (self.input_len, 1),
            "--output-len": (self.output_len, 1),
            "--max-model-len": (self.max_model_len, 2),
            "--seed": (self.seed, 0),
        }
        for option, (value, least) in at_least.items():
            if value is not None and value < least:
                raise ConfigError(f"{option} {value}: must be at least {least}")
        brings = "--topology" if self.topology is not None else "--trace" if self.trace is not None else None
        for option, length in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            if brings is not None and length is not None:
                raise ConfigError(f"{option} {length}: {brings} brings its own lengths; leave one of the two out")


class PlannedLoad(NamedTuple):
    """A plan with the traces that it replays, by stream, and the seed of its prompts."""

    plan: LoadPlan
    traces: dict[str, Trace]
    seed: int


def plan_traffic(flags: BenchFlags, pace: Pace) -> PlannedLoad:
    """What is sent and when; raises ConfigError for options that do not go together."""
    flags.check()
    seed = flags.seed or 0
    if flags.topology is not None:
        return _topology(flags, flags.topology, pace)
    given = flags.given()
    if flags.trace is not None:
        trace = load_trace(flags.trace, traffic.TraceOptions(**given), flags.max_model_len)
        return PlannedLoad(trace_plan(trace, flags.num_prompts, pace, seed), {"trace": trace}, seed)
    if given:
        option = "--trace-" + next(iter(given)).replace("_", "-")
        known = {"--trace-slice": "--slice", "--trace-limit": "--limit", "--trace-max-context": "--max-context"}
        raise ConfigError(f"{known.get(option, option)}: is about a trace; give one by --trace FILE")
    count = flags.num_prompts or DEFAULT_NUM_PROMPTS
    plan = lengths_plan(flags.input_len or INPUT_LEN, flags.output_len or OUTPUT_LEN, count, pace, seed)
    return PlannedLoad(plan, {}, seed)


def _topology(flags: BenchFlags, file: Path, pace: Pace) -> PlannedLoad:
    traffic = Traffic(kv_bandwidth=None, rate=None, duration=None, replay=flags, seed=flags.seed)
    topology = read_topology(file, traffic)
    traces = load_traces(topology, load_catalog())
    plan = topology_plan(topology.workload, traces, flags.num_prompts, pace)
    return PlannedLoad(plan, traces, topology.workload.seed)

"""An experiment: the runs of a topology one after the other on this machine, and what they come to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from emulator.core import expectation, fidelity, verdict
from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.compare_summary import CompareSummary, RunParity, stated_first_token
from emulator.core.deploy import plan_runs
from emulator.core.device_spec import DeviceSpec
from emulator.core.device_use import NodeDevice, device_use
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.kv_memory import kv_memory
from emulator.core.parity import run_parity
from emulator.core.physics import violations
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult, summarize
from emulator.core.specs import Scale, Topology
from emulator.core.trace import Trace
from emulator.core.trace_summary import ReplayedTrace, replayed
from emulator.core.workload import plan_load
from emulator.lab.compose import ComposeLauncher
from emulator.lab.devices import load_calibration
from emulator.lab.kept_kv import foresee_kv_bytes, granted_memory_bytes
from emulator.lab.launch import Launcher, LiveResult, ProcessLauncher
from emulator.lab.parallel import simulate_all
from emulator.lab.run_folder import RunFolder, new_folder, pretty
from emulator.lab.simulated import MODELLED, SIMULATE, simulated_result, transfer_rows
from emulator.lab.sites import CLIENT, ROUTER, LauncherName, ShapingName, choose_shaping, make_site
from emulator.live.reports import RunReport, TransferRow
from emulator.live.status import Interim

UNSHAPED = "UNSHAPED"

OnProgress = Callable[[RunSpec, Interim], None]
OnResult = Callable[[RunSpec, RunResult], None]
MakeLauncher = Callable[["Experiment", RunSpec, int, Path, Callable[[Interim], None]], Launcher]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How an experiment is run: where, links shaped by whom, KV checked, links that are not as asked allowed.

    With `check` each live run is simulated too, and the two are compared; there must be that, or an expectation.
    """

    launcher: LauncherName = "local"
    shaping: ShapingName | None = None
    verify_kv: bool = False
    force: bool = False
    check: bool = False


@dataclass(frozen=True, slots=True)
class Experiment:
    """A topology's runs, checked against this machine, with the folder they are written to.

    `expected_kv_bytes` of each run are real memory here, so a simulated one has none.
    """

    topology: Topology
    runs: tuple[RunSpec, ...]
    host_memory_bytes: int
    expected_kv_bytes: tuple[int, ...]
    launcher: str
    shaping: str
    folder: Path
    check: bool = False
    traces: tuple[ReplayedTrace, ...] = ()

    def shaping_of(self, run: RunSpec) -> str:
        """How the links of a run are shaped; `none` where no KV crosses a network."""
        return self.shaping if run.link is not None else "none"


def prepare(
    topology: Topology,
    catalog: Catalog,
    traces: dict[str, Trace],
    how: Conditions | None = None,
    *,
    deployments: Sequence[str] | None = None,
    out: Path | None = None,
) -> Experiment:
    """Plan every run and check that it can work before any starts; only then make the folder.

    Raises ConfigError or CapacityError for whatever a user has to mend.
    """
    how = how or Conditions()
    if how.check and how.launcher == SIMULATE and not topology.expectations:
        raise ConfigError(
            "--check: compares live runs with their simulation, and results with expectations, of which "
            f"{topology.name} has none; give a live --launcher, such as local"
        )
    if (how.force or how.verify_kv) and how.launcher == SIMULATE:
        option = "--force" if how.force else "--verify-kv"
        raise ConfigError(f"{option}: a simulation has no links to prove and no bytes to check; leave it out")
    shaping = choose_shaping(how.launcher, how.shaping)
    if how.launcher == SIMULATE:
        topology = msgspec.structs.replace(topology, scale=Scale(), device=DeviceSpec())
    load = plan_load(topology.workload, traces)
    topology, calibration = calibrated(topology)
    runs = tuple(
        plan_runs(
            topology,
            catalog,
            load,
            deployments=deployments,
            verify_kv=how.verify_kv,
            force=how.force,
            calibration=calibration,
        )
    )
    if deployments is None:
        verdict.check_equal_hardware(
            {run.deployment: run.gpus for run in runs if run.link is not None},
            {run.deployment: run.gpus for run in runs if run.link is None},
        )
    granted = granted_memory_bytes(runs[0])
    expected = tuple(0 if how.launcher == SIMULATE else foresee_kv_bytes(run, granted) for run in runs)
    folder = new_folder(out, topology.name)
    replays = replayed(topology.workload, traces, load)
    return Experiment(topology, runs, granted, expected, how.launcher, shaping, folder, how.check, replays)


def calibrated(topology: Topology) -> tuple[Topology, CalibratedUnits | None]:
    """What the calibration of a topology's device says, and the topology as it is recorded: it names no folder of this
    machine. Raises ConfigError for a calibration that cannot be used.
    """
    calibration = load_calibration(topology.device)
    if calibration is None:
        return topology, None
    device = msgspec.structs.replace(topology.device, calibration=calibration.file)
    return msgspec.structs.replace(topology, device=device), calibration


def launcher_for(
    experiment: Experiment, run: RunSpec, expected_kv_bytes: int, logs: Path, on_progress: Callable[[Interim], None]
) -> Launcher:
    """What runs one run of an experiment on this machine, as its conditions say."""
    kernel_shaping = experiment.shaping_of(run) == "kernel"
    holders = len(run.kv_holders)
    if experiment.launcher == "compose":
        return ComposeLauncher(
            run=msgspec.structs.replace(run, host_memory_bytes=experiment.host_memory_bytes),
            logs=logs,
            kernel_shaping=kernel_shaping,
            on_progress=on_progress,
        )
    return ProcessLauncher(
        run=run,
        site=make_site(experiment.launcher, run),
        folder=logs,
        host_memory_bytes=experiment.host_memory_bytes // max(1, holders),
        expected_kv_bytes=expected_kv_bytes,
        kernel_shaping=kernel_shaping,
        on_progress=on_progress,
    )


async def perform(
    experiment: Experiment, on_progress: OnProgress, on_result: OnResult, make_launcher: MakeLauncher = launcher_for
) -> list[RunResult]:
    """Run everything in order; each run's folder is complete when its result is told."""
    results: list[RunResult] = []
    for run, expected in zip(experiment.runs, experiment.expected_kv_bytes, strict=True):
        shaping = experiment.shaping_of(run)
        folder = RunFolder(experiment.folder, run, experiment.topology, launcher=experiment.launcher, shaping=shaping)
        try:
            if experiment.launcher == SIMULATE:
                result = await asyncio.to_thread(simulated_result, run)
                transfers = transfer_rows(result)
            else:
                launcher = make_launcher(experiment, run, expected, folder.logs, partial(on_progress, run))
                result, transfers = _result(experiment, run, await launcher.launch())
        except BaseException:
            folder.finish("broken")
            raise
        folder.write(result, transfers)
        results.append(result)
        on_result(run, result)
    return results


def compare(experiment: Experiment, on_progress: OnProgress, on_result: OnResult) -> CompareSummary:
    """Run everything, judge it, and write summary.json and report.html into the experiment's folder."""
    return conclude(experiment, asyncio.run(perform(experiment, on_progress, on_result)))


def conclude(experiment: Experiment, results: Sequence[RunResult]) -> CompareSummary:
    """Judge what was run, and write summary.json and report.html into the experiment's folder."""
    judgement = verdict.judge(results, experiment.topology.slo)
    summary = summarize_experiment(experiment, results, judgement)
    (experiment.folder / "summary.json").write_bytes(pretty(summary))
    from emulator.report.html import write_report  # noqa: PLC0415 - plotly is slow to load, and only this needs it

    write_report(experiment.folder, summary, results)
    return summary


def summarize_experiment(
    experiment: Experiment, results: Sequence[RunResult], judgement: verdict.Judgement
) -> CompareSummary:
    """The document that `--json` prints."""
    first, topology = experiment.runs[0], experiment.topology
    runs = tuple(result.summary for result in results)
    return CompareSummary(
        topology=topology.name,
        launcher=experiment.launcher,
        shaping=_overall([result.summary.shaping for result in results]),
        scale=first.scale,
        first_token=stated_first_token(run.first_token for run in experiment.runs),
        seed=first.seed,
        slo=topology.slo,
        runs=runs,
        verdict=judgement.verdicts,
        withheld=judgement.withheld,
        parity=_parity(experiment, results) if experiment.check and experiment.launcher != SIMULATE else (),
        expectations=expectation.check(topology.expectations, runs, judgement.verdicts),
        traces=experiment.traces,
        device=first.device.kind,
    )


def _parity(experiment: Experiment, results: Sequence[RunResult]) -> tuple[RunParity, ...]:
    simulated = dict(simulate_all(experiment.runs))
    return tuple(run_parity(result.summary, simulated[n]) for n, result in enumerate(results))


def _overall(shapings: Sequence[str]) -> str:
    """One word for all runs: UNSHAPED if any is, else how those with a KV network are shaped."""
    return next((shaping for shaping in (UNSHAPED, "kernel", "paced", MODELLED) if shaping in shapings), "none")


def _wrongly_dropped(report: RunReport) -> int:
    """KV frames that should not have been dropped; those of aborted requests, such as at a run's cut, should."""
    aborted = any(record.outcome != "completed" for record in report.records)
    return sum(node.kv.dropped_frames + (0 if aborted else node.kv.stray_frames) for node in report.nodes)


def _loop_lags(report: RunReport) -> Iterator[tuple[str, Sequence[float]]]:
    """Every process that has reported, and how late its event loop was."""
    yield ROUTER, report.router.loop_lag_s
    yield CLIENT, report.loop_lag_s
    for node in report.nodes:
        yield node.name, node.loop_lag_s


def _result(experiment: Experiment, run: RunSpec, live: LiveResult) -> tuple[RunResult, list[TransferRow]]:
    if live.report.load is not None:
        run = msgspec.structs.replace(run, load=live.report.load)
    records = live.report.records
    steps = tuple(sorted((s for node in live.report.nodes for s in node.steps), key=lambda s: (s.start_s, s.node)))
    lost = live.report.router.lost_nodes
    memory = tuple(sorted((m for node in live.report.nodes for m in node.memory), key=lambda m: m.at_s))
    transfers = [row for node in live.report.nodes for row in node.kv.transfers]
    device = device_use(
        run.device,
        (NodeDevice(node=n.name, device_id=n.device_id, description=n.device) for n in live.report.nodes),
        steps,
    )
    observed = fidelity.Observed(
        steps=steps,
        records=records,
        loop_lag_s=[*live.report.loop_lag_s, *live.report.router.loop_lag_s],
        longest_lag_s={name: max(lags, default=0.0) for name, lags in _loop_lags(live.report)},
        transfers=[fidelity.ObservedTransfer(row.source, row.node, row.parts) for row in transfers],
        cpu_busy=live.cpu_busy,
        probes=live.report.probes,
        unretained_bytes=sum(node.kv.unretained_bytes for node in live.report.nodes),
        dropped_frames=_wrongly_dropped(live.report),
        lost_nodes=lost,
        qdisc_drops=sum(node.kv.qdisc_drops for node in live.report.nodes),
        # a lost node has taken its steps along, so what requests did there has nothing to be held against
        impossible=() if lost else violations(run, records, steps, memory=memory),
        clock_uncertainty_s=max(
            [live.report.clock_uncertainty_s, *(node.clock_uncertainty_s for node in live.report.nodes)]
        ),
        device=device,
    )
    summary = summarize(
        records,
        deployment=run.deployment,
        gpus=run.gpus,
        slo=run.slo,
        duration_s=run.load.duration_s,
        kv_bandwidth_bps=run.link.bandwidth_bps if run.link is not None else None,
        launcher=experiment.launcher,
        shaping=UNSHAPED if any(p.problem() for p in live.report.probes) else experiment.shaping_of(run),
        seed=run.seed,
        fidelity=fidelity.judge(run, observed),
        holdings=run.holdings,
        first_token=run.first_token,
        kv_memory=kv_memory(run, records, steps, memory),
        device=device,
        ended_by=live.report.ended_by,
    )
    if experiment.shaping_of(run) == "kernel":
        kv = [node.kv for node in live.report.nodes]
        counts = msgspec.structs.replace(
            summary.kv,
            tcp_retransmits=sum(node.tcp_retransmits for node in kv),
            qdisc_drops=sum(node.qdisc_drops for node in kv),
        )
        summary = msgspec.structs.replace(summary, kv=counts)
    return RunResult(summary=summary, records=records, steps=steps, memory=memory), transfers

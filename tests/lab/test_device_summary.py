"""What a run says of its devices: in its manifest, its summary, the verdict and the report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emulator.core.device_spec import DeviceSpec
from emulator.core.records import StepRecord
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.core.specs import Topology
from emulator.lab import experiment as lab
from emulator.lab.calibration_files import write_calibration
from emulator.lab.catalog_files import load_catalog
from emulator.lab.launch import LiveResult
from emulator.lab.topology_files import load_topology
from emulator.live.reports import KvReport, NodeReport, RouterReport, RunReport
from emulator.live.status import Interim
from emulator.simulate import simulate
from tests.lab.test_calibrate import measured
from tests.live.lab import SMALL


class Computed:
    """Runs a cluster in virtual time and reports as if its nodes had computed, `stretched` times too slowly."""

    def __init__(self, run: RunSpec, devices: Callable[[str], tuple[str, str]], stretched: float) -> None:
        self.run, self.devices, self.stretched = run, devices, stretched

    async def launch(self) -> LiveResult:
        """The result of one launch."""
        simulated = simulate(self.run)
        nodes = tuple(self._node(node.name, simulated.steps) for node in self.run.nodes)
        report = RunReport(
            records=tuple(simulated.records),
            probes=(),
            loop_lag_s=(0.0,),
            router=RouterReport(loop_lag_s=(0.0,), ignored_messages=0, unended_requests=0),
            nodes=nodes,
        )
        return LiveResult(report, (0.1,))

    def _node(self, name: str, steps: Any) -> NodeReport:
        device_id, description = self.devices(name)
        own = tuple(self._slower(step) for step in steps if step.node == name)
        return NodeReport(
            name=name,
            steps=own,
            kv=KvReport(),
            loop_lag_s=(),
            preemptions=0,
            device=description,
            device_id=device_id,
        )

    def _slower(self, step: StepRecord) -> StepRecord:
        """The step as if planned to be that much shorter, so that it takes the place that it has."""
        return msgspec.structs.replace(
            step, planned_s=step.planned_s / self.stretched, delta_s=step.delta_s / self.stretched
        )


def _compared(
    device: DeviceSpec, folder: Path, devices: Callable[[str], tuple[str, str]], stretched: float = 1.0
) -> tuple[Any, list[RunResult]]:
    """The summary of the small lab on a device, as its document."""
    topology: Topology = msgspec.structs.replace(load_topology(SMALL), device=device)
    prepared = lab.prepare(topology, load_catalog(), {}, out=folder)

    def launcher(
        experiment: lab.Experiment, run: RunSpec, expected: int, logs: Path, on_progress: Callable[[Interim], None]
    ) -> Computed:
        return Computed(run, devices, stretched)

    results = asyncio.run(lab.perform(prepared, lambda *_: None, lambda *_: None, launcher))
    return msgspec.json.decode(msgspec.json.encode(lab.conclude(prepared, results))), results


def _one_gpu(name: str) -> tuple[str, str]:
    return "GPU-1", "NVIDIA H200"


def _own_gpu(name: str) -> tuple[str, str]:
    return f"GPU-{name[-1]}{name[0]}", "NVIDIA H200"


def test_the_plan_has_the_topologys_device_and_so_does_the_manifest(tmp_path: Path) -> None:
    device = DeviceSpec(kind="cuda", gpus=(1, 0))
    document, results = _compared(device, tmp_path / "o", _own_gpu)
    assert document["device"] == "cuda"
    run = results[-1].summary
    assert run.fidelity.ok
    assert [(node.node, node.description) for node in run.device.nodes] == [
        ("prefill-0", "NVIDIA H200"),
        ("decode-0", "NVIDIA H200"),
    ]
    assert run.device.shared == ()
    manifest = msgspec.json.decode((tmp_path / "o" / "1P1D@0.2Gbps" / "manifest.json").read_bytes())
    assert (manifest["device"]["kind"], manifest["device"]["gpus"]) == ("cuda", [1, 0])
    assert [node["description"] for node in manifest["device"]["nodes"]] == ["NVIDIA H200"] * 2
    assert manifest["topology"]["device"]["gpus"] == [1, 0]


def test_no_verdict_is_made_of_nodes_that_share_a_gpu_and_the_reason_is_said(tmp_path: Path) -> None:
    document, results = _compared(DeviceSpec(kind="cuda"), tmp_path / "o", _one_gpu, stretched=1.5)
    assert document["verdict"] == []
    (withheld,) = document["withheld"]
    assert "colocated-0 and colocated-1 compute on one NVIDIA H200" in withheld["reason"]
    assert "--allow-shared-gpu" in withheld["reason"]
    assert [result.summary.fidelity.suggested_scale_time for result in results] == [None, None]


def test_sharing_that_is_allowed_is_judged_and_stamped_everywhere(tmp_path: Path) -> None:
    device = DeviceSpec(kind="cuda", allow_shared_gpu=True)
    document, _ = _compared(device, tmp_path / "o", _one_gpu, stretched=1.5)
    assert document["withheld"] == []
    (verdict,) = document["verdict"]
    stamp = "SHARED GPU: prefill-0 and decode-0 compute on one NVIDIA H200; their steps stretch each other"
    assert stamp in verdict["text"]
    assert stamp in (tmp_path / "o" / "report.html").read_text()
    (shared,) = document["runs"][1]["device"]["shared"]
    assert shared["nodes"] == ["prefill-0", "decode-0"]
    assert (shared["stretch_p50"], shared["stretch_p99"]) == (pytest.approx(1.5), pytest.approx(1.5))
    folder = tmp_path / "o" / "1P1D@0.2Gbps"
    assert msgspec.json.decode((folder / "manifest.json").read_bytes())["device"]["shared"] == [shared]
    assert msgspec.json.decode((folder / "summary.json").read_bytes())["device"]["shared"] == [shared]


def test_a_topology_with_a_device_is_simulated_without_it(tmp_path: Path) -> None:
    topology = msgspec.structs.replace(load_topology(SMALL), device=DeviceSpec(kind="cuda", gpus=(7,)))
    how = lab.Conditions(launcher="simulate")
    prepared = lab.prepare(topology, load_catalog(), {}, how, out=tmp_path / "o")
    assert {run.device.kind for run in prepared.runs} == {"virtual"}


def test_the_calibration_of_a_run_is_recorded_and_its_folder_is_not(tmp_path: Path) -> None:
    found = msgspec.structs.replace(measured()[0], kind="cuda")
    write_calibration(tmp_path / "mine.toml", found)
    device = DeviceSpec(kind="cuda", calibration=str(tmp_path / "mine.toml"))
    document, results = _compared(device, tmp_path / "o", _own_gpu)
    used = {"file": "mine.toml", "device": "Fake H100", "measured_at": found.measured_at}
    assert [run["device"]["calibration"] for run in document["runs"]] == [used, used]
    assert results[0].summary.device.calibration is not None
    manifest = (tmp_path / "o" / "1P1D@0.2Gbps" / "manifest.json").read_bytes()
    recorded = msgspec.json.decode(manifest)
    assert recorded["device"]["calibration"] == used | {
        "kind": "cuda",
        "mn": found.mn,
        "units": msgspec.json.decode(msgspec.json.encode(found.unit_times())),
    }
    assert recorded["topology"]["device"]["calibration"] == "mine.toml"
    assert str(tmp_path).encode() not in manifest
    assert f"Steps planned by mine.toml: Fake H100, {found.measured_at}" in (tmp_path / "o" / "report.html").read_text()

"""Nodes that compute with NumPy, end to end: KV of their blocks arrives as it was computed, however it is sent."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.deploy import plan_runs
from emulator.core.device_spec import DevicePlan
from emulator.core.errors import ConfigError
from emulator.core.run_spec import RunSpec
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.launch import ProcessLauncher
from emulator.lab.sites import make_site
from emulator.lab.topology_files import load_topology
from emulator.live.device_lock import Patience, device_lock
from emulator.live.numpy_device import MN, NumpyBackend, description
from emulator.live.reports import RunReport
from emulator.live.unit_times import measure_units
from tests.builders import load_plan, request
from tests.live.lab import SMALL

pytestmark = [pytest.mark.live, pytest.mark.alone]

BYTES_PER_TOKEN = 4096


def numpy_run(folder: Path, keys: str = 'overlap = "chunk"', *, scale: str = "", **changes: Any) -> RunSpec:
    """The small lab's 1P1D on NumPy with these keys instead of its overlap: four times as slow, eight requests."""
    text = SMALL.read_text(encoding="utf-8").replace('overlap = "chunk"', keys)
    text = text.replace('duration = "1.5s"', 'duration = "0.8s"')
    text += f"\n[scale]\ntime = 4.0\n{scale}\n"
    path = folder / "numpy.toml"
    path.write_text(text, encoding="utf-8")
    topology = load_topology(path)
    load = plan_load(topology.workload, {})
    (run,) = plan_runs(topology, load_catalog(), load, deployments=["1P1D"], verify_kv=True)
    return msgspec.structs.replace(run, **{"device": DevicePlan(kind="numpy"), **changes})


def launch(run: RunSpec, folder: Path, *, memory_bytes: int = 256 << 20, expected_bytes: int = 0) -> RunReport:
    """The report of a run by real processes."""
    launcher = ProcessLauncher(
        run=run,
        site=make_site("local", run),
        folder=folder,
        host_memory_bytes=memory_bytes,
        expected_kv_bytes=expected_bytes,
        kernel_shaping=False,
        on_progress=lambda _: None,
    )
    return asyncio.run(launcher.launch()).report


def check_kv(run: RunSpec, report: RunReport) -> None:
    """Every request was served with KV that its receiver found right."""
    assert len(report.records) == len(run.load.open) > 3
    for record in report.records:
        assert record.outcome == "completed", record.reason
        assert record.kv_bytes is not None
        assert record.kv_bytes >= BYTES_PER_TOKEN * record.prompt_tokens
    prefill, decode = report.nodes
    assert decode.kv.received_bytes > 0
    assert decode.kv.dropped_frames == decode.kv.unretained_bytes == 0
    assert decode.kv.peak_retained_bytes > 0
    assert prefill.device == decode.device != "virtual"
    assert prefill.device_id == decode.device_id != ""


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ('overlap = "none"', ""),
        ('overlap = "chunk"', ""),
        ('overlap = "layer"\nlayer_groups = 3', "bytes = 3.7"),
        ('overlap = "none"\ntransfer_mode = "pull"', ""),
    ],
    ids=["none", "chunk", "layer-scaled", "pull"],
)
def test_kv_arrives_as_it_was_computed(tmp_path: Path, keys: str, scale: str) -> None:
    run = numpy_run(tmp_path, keys, scale=scale)
    report = launch(run, tmp_path)
    check_kv(run, report)
    assert sum(node.preemptions for node in report.nodes) == 0


def test_calibrated_nodes_compute_by_what_they_were_sent(tmp_path: Path) -> None:
    with closing(NumpyBackend()) as backend, device_lock(backend.device_id, Patience(60.0)):
        units = measure_units(backend)
    calibration = CalibratedUnits(
        file="c.toml", kind="numpy", device=description(), measured_at="2026-11-30", mn=MN, units=units
    )
    few = load_plan([request(f"r{n}", prompt_tokens=96, max_tokens=4) for n in range(4)], duration_s=0.1)
    run = numpy_run(tmp_path, device=DevicePlan(kind="numpy", calibration=calibration), load=few)
    check_kv(run, launch(run, tmp_path))
    other = msgspec.structs.replace(calibration, device="another processor, 2 cores")
    with pytest.raises(ConfigError, match=r"^calibration c\.toml: was measured on another .*, and \w+-0 has "):
        launch(msgspec.structs.replace(run, device=DevicePlan(kind="numpy", calibration=other)), tmp_path)


@pytest.mark.parametrize("preemption", ["recompute", "prefill"])
def test_kv_is_right_where_memory_is_short(tmp_path: Path, preemption: str) -> None:
    """Blocks change hands again and again, also while KV comes in."""
    run = numpy_run(tmp_path, f'overlap = "chunk"\npreemption = "{preemption}"')
    prefill, decode = run.nodes
    run = msgspec.structs.replace(
        run,
        nodes=(prefill, msgspec.structs.replace(decode, kv_blocks=30, num_reserved_decode_tokens=0)),
        load=load_plan([request(f"r{n}", prompt_tokens=96, max_tokens=60) for n in range(6)], duration_s=1.0),
    )
    report = launch(run, tmp_path)
    check_kv(run, report)
    assert sum(node.preemptions for node in report.nodes) > 0


def test_a_run_beyond_its_memory_ends_with_one_line(tmp_path: Path) -> None:
    run = numpy_run(tmp_path)
    with pytest.raises(ConfigError, match=r"^prefill-0: its KV needs more than the 102\.4kB .* scale\.bytes"):
        launch(run, tmp_path, memory_bytes=100 << 10)

"""`--device` and `--allow-shared-gpu`: laid over the topology, and refused where nothing computes."""

from __future__ import annotations

import ctypes
import socket
from pathlib import Path

import msgspec
import pytest

from emulator.cli.member import Planned
from emulator.cli.options import DeviceFlags
from emulator.core.device_spec import DeviceSpec
from emulator.core.errors import ConfigError
from emulator.lab import docker
from emulator.lab.calibration_files import write_calibration
from tests.in_process import Pdemu
from tests.lab.test_calibrate import measured
from tests.live.lab import SMALL

CUDA = DeviceSpec(kind="cuda", gpus=(1,))


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)


def test_options_are_laid_over_the_topologys_device() -> None:
    assert DeviceFlags().applied(CUDA) == CUDA
    assert DeviceFlags(device="virtual").applied(CUDA) == DeviceSpec()
    assert DeviceFlags(device="cuda").applied(DeviceSpec()) == DeviceSpec(kind="cuda")
    shared = DeviceFlags(allow_shared_gpu=True).applied(CUDA)
    assert shared == DeviceSpec(kind="cuda", gpus=(1,), allow_shared_gpu=True)
    calibrated = DeviceFlags(calibration=Path("c.toml")).applied(CUDA)
    assert calibrated == DeviceSpec(kind="cuda", gpus=(1,), calibration="c.toml")
    assert DeviceFlags(device="numpy").applied(calibrated) == DeviceSpec(kind="numpy")


NEEDS_A_GPU = {
    "run": ["run", "--deployment", "1P1D", "--device", "cuda"],
    "compare": ["compare", "--device", "cuda"],
    "compare at an own scale": ["compare", "--device", "cuda", "--scale", "auto"],
    "compare in containers": ["compare", "--device", "cuda", "--launcher", "compose"],
    "goodput": ["goodput", "--live", "--device", "cuda"],
    "break-even": ["break-even", "--live", "--device", "cuda"],
    "up": ["up", "--device", "cuda"],
}


@pytest.mark.parametrize("case", NEEDS_A_GPU)
def test_a_gpu_that_is_not_there_is_one_line_before_anything_starts(
    case: str, tmp_path: Path, pdemu: Pdemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "compose_command", lambda: ["docker", "compose"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    command, *options = NEEDS_A_GPU[case]
    refused = pdemu(command, SMALL, *options, "--out", tmp_path / "o")
    refused.check_refusal(["device cuda", "no NVIDIA driver", "--device virtual"])
    assert not (tmp_path / "o").exists()


def test_so_it_is_at_a_node_started_by_hand(pdemu: Pdemu, monkeypatch: pytest.MonkeyPatch) -> None:
    from emulator.lab import member

    monkeypatch.setattr(member, "reexec_for_memory", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def opened(*_: object) -> None:
        pytest.fail("a socket was opened")

    monkeypatch.setattr(socket, "create_connection", opened)
    planned = ["--topology", str(SMALL), "--deployment", "1P1D", "--name", "prefill-0", "--kv-address", "127.0.0.1"]
    pdemu("node", *planned, "--device", "cuda").check_refusal(["device cuda", "CuPy is not installed", "virtual"])
    pdemu("node", *planned, "--gpu", "0").check_refusal(["--gpu 0", "device is virtual", "--device cuda"])


REFUSED = {
    "a simulation": (["compare", "--launcher", "simulate", "--device", "cuda"], ["--device cuda", "models its steps"]),
    "sharing in one": (["compare", "--launcher", "simulate", "--allow-shared-gpu"], ["--allow-shared-gpu", "models"]),
    "a search": (["goodput", "--device", "numpy"], ["--device numpy", "--live"]),
    "a break-even": (["break-even", "--device", "numpy"], ["--device numpy", "--live"]),
    "sharing what is nobody's": (["compare", "--allow-shared-gpu"], ["virtual devices share nothing"]),
    "a calibration in a simulation": (
        ["compare", "--launcher", "simulate", "--calibration", "c.toml"],
        ["--calibration c.toml", "models its steps"],
    ),
    "a calibration in a search": (["goodput", "--calibration", "c.toml"], ["--calibration c.toml", "--live"]),
    "a calibration of nothing": (["up", "--calibration", "c.toml"], ["--calibration c.toml", "compute nothing"]),
    "a calibration that is not there": (
        ["run", "--deployment", "1P1D", "--device", "numpy", "--calibration", "c.toml"],
        ["calibration c.toml: cannot be read"],
    ),
    "no such device": (["compare", "--device", "tpu"], ["--device", "'tpu'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_device_where_nothing_computes_is_refused(case: str, tmp_path: Path, pdemu: Pdemu) -> None:
    (command, *options), expected = REFUSED[case]
    pdemu(command, SMALL, *options, "--out", tmp_path / "o").check_refusal(expected)
    assert not (tmp_path / "o").exists()


def test_a_topology_with_a_gpu_is_simulated_anywhere(tmp_path: Path, pdemu: Pdemu) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.read_text() + '\n[device]\nkind = "cuda"\ngpus = [3]\ncalibration = "none.toml"\n')
    ended = pdemu("run", path, "--deployment", "1P1D", "--launcher", "simulate", "--json", "--out", tmp_path / "o")
    assert ended.code == 0, ended.err
    assert msgspec.json.decode(ended.out)["device"] == "virtual"
    pdemu("run", path, "--deployment", "1P1D", "--out", tmp_path / "p").check_refusal(["device cuda"])


def test_members_plan_the_device_and_tell_containers_of_it() -> None:
    planned = Planned(topology=SMALL, deployment="1P1D", device="cuda", allow_shared_gpu=True)
    assert planned.plan().device == DeviceSpec(kind="cuda", allow_shared_gpu=True).plan()
    environment = planned.environment()
    assert (environment["PDEMU_DEVICE"], environment["PDEMU_ALLOW_SHARED_GPU"]) == ("cuda", "1")
    with pytest.raises(ConfigError, match="virtual devices share nothing"):
        Planned(topology=SMALL, deployment="1P1D", allow_shared_gpu=True).plan()


def test_a_members_device_is_read_from_the_environment(pdemu: Pdemu, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("compose", SMALL, "--deployment", "1P1D")
    monkeypatch.setenv("PDEMU_DEVICE", "")
    monkeypatch.setenv("PDEMU_ALLOW_SHARED_GPU", "")
    assert "reservations" not in pdemu(*asked).out
    monkeypatch.setenv("PDEMU_DEVICE", "cuda")
    monkeypatch.setenv("PDEMU_ALLOW_SHARED_GPU", "1")
    text = pdemu(*asked).out
    assert text.count("reservations") == 2
    assert text.count('PDEMU_DEVICE: "cuda"') == text.count('PDEMU_ALLOW_SHARED_GPU: "1"') == 4


COMMANDS = {
    "run": ["run", "--deployment", "1P1D"],
    "compare": ["compare"],
    "up": ["up"],
    "goodput": ["goodput", "--live"],
    "break-even": ["break-even", "--live"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_calibration_of_another_machine_is_one_line_before_anything_starts(
    case: str, tmp_path: Path, pdemu: Pdemu
) -> None:
    path = tmp_path / "mine.toml"
    write_calibration(path, msgspec.structs.replace(measured()[0], kind="numpy"))
    command, *options = COMMANDS[case]
    refused = pdemu(command, SMALL, *options, "--device", "numpy", "--calibration", path, "--out", tmp_path / "o")
    refused.check_refusal(["mine.toml: was measured on Fake H100, and this machine has"])
    assert not (tmp_path / "o").exists()


def test_a_calibration_of_another_kind_is_refused_where_a_run_is_only_planned(tmp_path: Path, pdemu: Pdemu) -> None:
    path = tmp_path / "mine.toml"
    write_calibration(path, msgspec.structs.replace(measured()[0], kind="numpy"))
    refused = pdemu("compose", SMALL, "--deployment", "1P1D", "--device", "cuda", "--calibration", path)
    refused.check_refusal(["mine.toml: is of device numpy", "calibrate with --device cuda"])


def test_a_member_reads_the_calibration_that_its_environment_names(
    tmp_path: Path, pdemu: Pdemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = msgspec.structs.replace(measured()[0], kind="numpy")
    write_calibration(tmp_path / "mine.toml", found)
    planned = Planned(topology=SMALL, deployment="1P1D", device="numpy", calibration=tmp_path / "mine.toml").plan()
    assert planned.device.calibration == found.units_in("mine.toml")
    monkeypatch.setenv("PDEMU_CALIBRATION", "")
    monkeypatch.setenv("PDEMU_DEVICE", "numpy")
    assert "locks:/lab/locks" in pdemu("compose", SMALL, "--deployment", "1P1D").out
    monkeypatch.setenv("PDEMU_CALIBRATION", str(tmp_path / "mine.toml"))
    text = pdemu("compose", SMALL, "--deployment", "1P1D").out
    assert text.count('PDEMU_CALIBRATION: "/lab/calibration/mine.toml"') == 4
    assert "locks:" not in text

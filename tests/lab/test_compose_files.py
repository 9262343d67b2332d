"""Compose files as compose itself reads them, for which no engine has to run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import Pdemu
from tests.live.lab import SMALL, TOPOLOGIES

ROOT = TOPOLOGIES.parent


def _compose() -> list[str]:
    """Compose's command, whether or not an engine answers it."""
    plugin = shutil.which("docker") and subprocess.run(
        ["docker", "compose", "version"], capture_output=True, check=False, timeout=30
    )
    if plugin and plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        assert os.environ.get("PDEMU_TEST_COMPOSE") != "required", "neither docker compose nor docker-compose is here"
        pytest.skip("needs docker compose or docker-compose")
    return ["docker-compose"]


def _read(file: Path, *options: str, **environment: str) -> Any:
    """The services of a compose file with its variables put in."""
    yaml = pytest.importorskip("yaml")
    done = subprocess.run(
        [*_compose(), "--file", str(file), *options, "config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=file.parent,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", **environment},
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["services"]


def _gpus(service: Any) -> list[str]:
    """The GPUs that a service reserves; only of the form that every compose knows."""
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    return [str(number) for number in device["device_ids"]]


def test_the_compose_file_by_hand_has_nodes_on_gpus_under_a_profile() -> None:
    file = ROOT / "docker-compose.yml"
    services = _read(file, "--profile", "cuda", PDEMU_DEVICE="cuda", PDEMU_GPU_1="5")
    always = {name for name, service in services.items() if not service.get("profiles")}
    assert always == {"router", "prefill", "decode", "client"}
    on_gpus = {name: _gpus(service) for name, service in services.items() if "deploy" in service}
    assert all(services[name]["profiles"] == ["cuda"] for name in on_gpus)
    assert on_gpus == {
        "prefill-cuda": ["0"],
        "decode-cuda": ["5"],
        "colocated-cuda-0": ["0"],
        "colocated-cuda-1": ["5"],
    }
    for name in on_gpus:
        assert services[name]["build"]["args"]["EXTRA"] == "cuda12"
        assert services[name]["image"] != services["router"]["image"]
        assert services[name]["command"][-2:] == ["--gpu", "0"]
        assert services[name]["environment"]["PDEMU_ROUTER"] == services["client"]["environment"]["PDEMU_ROUTER"]
    assert {service["environment"]["PDEMU_DEVICE"] for service in services.values()} == {"cuda"}
    for name in ("prefill", "decode", *on_gpus):
        assert services[name]["environment"]["PDEMU_LOCKS"] == "/lab/locks", "those on one device measure it in turn"
        assert "/lab/locks" in str(services[name]["volumes"])
    for name in ("prefill", "decode"):
        twin = services[f"{name}-cuda"]
        assert twin["cap_add"] == services[name]["cap_add"] == ["NET_ADMIN"]
        assert twin["networks"] == services[name]["networks"]


def test_a_printed_compose_file_reserves_gpus_in_a_form_that_compose_reads(tmp_path: Path, pdemu: Pdemu) -> None:
    topology = tmp_path / "small.toml"
    topology.write_text(SMALL.read_text() + '\n[device]\nkind = "cuda"\ngpus = [2, 1]\n')
    file = tmp_path / "lab.yml"
    printed = pdemu("compose", topology, "--deployment", "1P1D")
    assert printed.code == 0, printed.err
    file.write_text(printed.out)
    services = _read(file)
    assert {name: _gpus(service) for name, service in services.items() if "deploy" in service} == {
        "prefill-0": ["2"],
        "decode-0": ["1"],
    }


def test_the_image_has_a_folder_for_locks_that_anybody_may_write_to() -> None:
    """A new volume is like the folder at its place."""
    assert "WORKDIR /lab\nRUN install -d -m 1777 locks\n" in (ROOT / "Dockerfile").read_text()


def test_what_an_image_with_cupy_is_built_from_reaches_the_build() -> None:
    """The Dockerfile installs requirements-EXTRA.lock; all that it copies must be let through to it."""
    dockerfile, let_through = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().splitlines()
    assert '-r "requirements-$EXTRA.lock"' in dockerfile
    assert "--require-hashes" in dockerfile.split("requirements-$EXTRA.lock")[0].splitlines()[-1]
    assert "COPY pyproject.toml requirements*.lock ./" in dockerfile
    assert "!requirements*.lock" in let_through

"""A run in containers: its compose file, and a launcher that brings it up, follows it and takes it down.

    control (internal)   router ── prefill-0 ── decode-0 ── … ── client
    kv (internal)                  prefill-0 ══ decode-0 ══ …            shaped by each node in its own container

Nodes that compute on GPUs are of an image that has CuPy, and each reserves one GPU, which is number 0 to it. Nodes that
measure their device share a volume, in which they lock it (`live.device_lock`).

The containers run `pdemu router`, `node` and `client`. For a launched run they are given the finished `RunSpec` in a
file and tell how they do in status lines on standard output; what the client hands over comes back in a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from emulator import __version__
from emulator.core.errors import ConfigError, DeadlineError, RunError
from emulator.core.run_spec import RunSpec
from emulator.lab import docker
from emulator.lab.launch import STOP_S, LiveResult, error_told, finish_limit_s, ready_limit_s
from emulator.lab.leftovers import Ledger, new_run_id
from emulator.lab.sites import CLIENT, ROUTER
from emulator.live.control import CurveKeys
from emulator.live.device_lock import LOCKS_ENV
from emulator.live.status import Failed, Interim, Status, Underway, Waiting

SOURCE = Path(__file__).parents[2]
IMAGE = f"pd-emulator:{__version__}"
CUDA_EXTRA = "cuda12"
"""Which CuPy an image with it has: that of requirements-cuda12.lock."""

CONTROL_PORT = 5555
LAB = "/lab"
"""Where a container finds what it is given: the topology's folder or the run, and where the client puts results."""
LOCKS = f"{LAB}/locks"
"""A folder of the image that anybody may write to; what is mounted there is like it."""

BUILD_S = 900.0
UP_S = 60.0
UNPRIVILEGED = 10001
_SHARED = {
    "PDEMU_SECRET": "${PDEMU_SECRET:-}",
    "PDEMU_METRICS": "${PDEMU_METRICS:-}",
    "PDEMU_ROUTER_PUBLIC_KEY": "${PDEMU_ROUTER_PUBLIC_KEY:-}",
    "PDEMU_INSECURE": "${PDEMU_INSECURE:-1}",  # both networks are internal to the engine's machine
}
HEALTH_S = 10
_NO_GPU = re.compile(r"could not select device driver|nvidia-container-cli|unknown device|CDI device")
"""What engines say who have no driver for the GPUs asked for, or not these GPUs."""


# --- the file -------------------------------------------------------------------------------------------------------


def render(run: RunSpec, environment: Mapping[str, str], mounts: Sequence[str], results: str) -> str:
    """The compose file of a run: `environment` says which, `mounts` what all see of it, `results` where it ends up.

    Both kinds of mount are as compose writes them, such as `/host/folder:/lab/topology:ro`.
    """
    check = _healthcheck(run.scale.time)
    router = _service(["router", "--listen", f"0.0.0.0:{CONTROL_PORT}"], environment, mounts, check)
    router["environment"]["PDEMU_ROUTER_SECRET_KEY"] = "${PDEMU_ROUTER_SECRET_KEY:-}"
    services = {ROUTER: router}
    for number, node in enumerate(run.nodes):
        service = _service(["node", "--name", node.name], _to_router(environment), mounts, check)
        service["depends_on"] = [ROUTER]
        if run.device.kind == "cuda":
            service |= _image(CUDA_EXTRA) | _reserved(run.device.gpu_of(number))
            service["command"] += ["--gpu", "0"]
        if run.device.measures:
            service["environment"][LOCKS_ENV] = LOCKS
            service["volumes"].append(f"locks:{LOCKS}")
        if run.link is not None:
            alias = f"{node.name}.kv"
            service["command"] += ["--kv-address", alias]
            service["networks"] = {"control": {}, "kv": {"aliases": [alias]}}
            service["cap_add"] = ["NET_ADMIN"]
        services[node.name] = service
    client = _service(["client"], _to_router(environment), [*mounts, results], check)
    services[CLIENT] = client | {"depends_on": [ROUTER, *(node.name for node in run.nodes)]}
    networks = {name: {"internal": True} for name in ("control", "kv") if name == "control" or run.link is not None}
    volumes: dict[str, Any] = {"volumes": {"locks": {}}} if run.device.measures else {}
    about = f"# {run.topology}, {run.label}; made by pdemu {__version__}. The client prints the table:\n"
    about += "#   docker compose -f FILE up --build --abort-on-container-exit --exit-code-from client\n"
    return about + to_yaml({"services": services, "networks": networks} | volumes)


def _healthcheck(scale_time: float) -> dict[str, Any]:
    """Ask every 10 s of model time; starting up is not stretched with it."""
    every_s = round(HEALTH_S * scale_time)
    return {
        "test": ["CMD", "python", "-m", "emulator.live.health"],
        "interval": f"{every_s}s",
        "timeout": f"{max(1, every_s // 2)}s",
        "retries": 3,
        "start_period": "60s",
    }


def _service(
    command: Sequence[str], environment: Mapping[str, str], mounts: Sequence[str], healthcheck: Mapping[str, Any]
) -> dict[str, Any]:
    return _image() | {
        "command": list(command),
        "environment": {name: literal(value) for name, value in environment.items()} | _SHARED,
        "volumes": [literal(mount) for mount in mounts],
        "networks": {"control": {}},
        "security_opt": ["no-new-privileges:true"],
        "healthcheck": healthcheck,
    }


def _image(extra: str = "") -> dict[str, Any]:
    """The image of a service, and how it is built where its source is; with an `extra`, that CuPy is in it."""
    variable, tag = ("PDEMU_CUDA_IMAGE", f"{IMAGE}-{extra}") if extra else ("PDEMU_IMAGE", IMAGE)
    image: dict[str, Any] = {"image": f"${{{variable}:-{tag}}}"}
    if (SOURCE / "Dockerfile").exists():
        args = {"PYTHON_IMAGE": "${PYTHON_IMAGE:-python:3.11-slim-bookworm}"} | ({"EXTRA": extra} if extra else {})
        image["build"] = {"context": str(SOURCE), "args": args}
    return image


def _reserved(gpu: int) -> dict[str, Any]:
    """One GPU of the engine's machine for a service, in the form that compose has had since docker-compose 1.28."""
    device = {"driver": "nvidia", "device_ids": [str(gpu)], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _to_router(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "PDEMU_ROUTER": f"tcp://{ROUTER}:{CONTROL_PORT}"}


def mount(source: Path, place: str) -> str:
    """A file or folder of this machine at a place of the lab; raises ConfigError where compose cannot write that."""
    if ":" in str(source):
        raise ConfigError(f"{source}: what has a colon in its name cannot be given to a container; use another folder")
    return f"{source}:{LAB}/{place}"


def literal(text: str) -> str:
    """Text that compose takes as it is, without looking for variables in it."""
    return text.replace("$", "$$")


def to_yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Block YAML of nested mappings with plain keys; every other value is written as JSON, which YAML includes."""
    lines = []
    for key, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            lines.append(f"{indent}{key}:\n{to_yaml(entry, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {msgspec.json.encode(entry).decode()}\n")
    return "".join(lines)


# --- running it -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ComposeLauncher:
    """Runs one `RunSpec` in containers, its files in `logs`; `on_progress` is told how far the client is.

    All nodes that take KV in may together keep the run's `host_memory_bytes` of KV.
    """

    run: RunSpec
    logs: Path
    kernel_shaping: bool
    on_progress: Callable[[Interim], None]
    failure: Exception | None = field(default=None, init=False)

    @property
    def _lab(self) -> Path:
        """What the containers share with this process."""
        return (self.logs / "lab").resolve()

    async def launch(self) -> LiveResult:
        """Build the image, bring the project up, wait for its end, collect; nothing of it outlives this call.

        Raises ConfigError without an engine or compose, DeadlineError for a run that does not end in time, RunError
        for one that broke down, and whatever a container told of.
        """
        command = await asyncio.to_thread(docker.compose_command)
        ledger = Ledger.open(new_run_id(self.run.topology))
        project = f"pdemu-{ledger.run_id}"
        file = self.logs / "compose.yml"
        compose = [*command, "--project-name", project, "--file", str(file)]
        try:
            self._furnish(file)
            if (SOURCE / "Dockerfile").exists():
                images = [ROUTER, *([self.run.nodes[0].name] if self.run.device.kind == "cuda" else [])]
                await self._execute([*compose, "build", *images], BUILD_S, ledger)
            ledger.note_compose(project, file)
            up = ["up", "--no-build", "--no-color", "--abort-on-container-exit", "--exit-code-from", CLIENT]
            await self._execute([*compose, *up], UP_S + ready_limit_s(self.run) + finish_limit_s(self.run), ledger)
            return msgspec.json.decode((self._lab / "live.json").read_bytes(), type=LiveResult)
        finally:
            await asyncio.to_thread(docker.take_down, project)
            ledger.drop_compose()
            ledger.close()
            shutil.rmtree(self._lab, ignore_errors=True)

    def _furnish(self, file: Path) -> None:
        """Write the compose file and what the containers are given."""
        self._lab.mkdir()
        (self._lab / "run.json").write_bytes(msgspec.json.encode(self.run))
        uid, gid = os.geteuid(), os.getegid()
        if uid == 0:
            uid = gid = UNPRIVILEGED
            os.chown(self._lab, uid, gid)
        environment = {
            "PDEMU_RUN": f"{LAB}/run.json",
            "PDEMU_OUT": f"{LAB}/results",
            "PDEMU_SHAPING": "kernel" if self.kernel_shaping else "paced",
            "PDEMU_USER": f"{uid}:{gid}",
        }
        given = mount(self._lab / "run.json", "run.json:ro")
        file.write_text(render(self.run, environment, [given], mount(self._lab, "results")), encoding="utf-8")

    async def _execute(self, command: list[str], limit_s: float, ledger: Ledger) -> None:
        """Run a compose command to its end; its output goes to a log, status lines in it are heeded."""
        keys = CurveKeys.new()
        environment = {
            **os.environ,
            "PDEMU_SECRET": secrets.token_hex(16),
            "PDEMU_ROUTER_PUBLIC_KEY": keys.public,
            "PDEMU_ROUTER_SECRET_KEY": keys.secret,
            "PDEMU_INSECURE": "0",
            "PDEMU_IMAGE": os.environ.get("PDEMU_IMAGE", IMAGE),
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        ledger.note_process(process.pid)
        try:
            async with asyncio.timeout(limit_s):
                last = await self._follow(process)
                code = await process.wait()
        except TimeoutError:
            raise DeadlineError(f"the containers did not end within {limit_s:g} s; see {self._log}") from None
        finally:
            await _end(process)
        if self.failure is not None:
            raise self.failure
        if code != 0 and _NO_GPU.search(last):
            raise ConfigError(
                f"device cuda: the container engine cannot give the nodes their GPUs ({last}); install the NVIDIA "
                "Container Toolkit, name GPUs that are there in [device] gpus, or use --device virtual"
            )
        if code != 0:
            raise RunError(
                f"`{' '.join(command[:2])} … {command[-1]}` ended with status {code}: {last}; see {self._log}"
            )

    @property
    def _log(self) -> Path:
        return self.logs / "compose.log"

    async def _follow(self, process: asyncio.subprocess.Process) -> str:
        """Read what compose and the containers say to the end; their last error, else the last line."""
        assert process.stdout is not None
        last = ""
        with self._log.open("ab") as log:
            async for line in process.stdout:
                log.write(line)
                log.flush()
                name, status = parse_line(line.decode(errors="replace"))
                if status is None and (said := line.decode(errors="replace").strip()):
                    last = said if _telling(said) or not _telling(last) else last
                elif isinstance(status, Waiting | Underway):
                    self.on_progress(status)
                elif isinstance(status, Failed) and self.failure is None:
                    self.failure = error_told(name, status.error, status.message, f"see {self._log}")
        return last


def _telling(line: str) -> bool:
    """Whether a line says why the containers ended, which those after it do not."""
    return "pdemu: " in line or _NO_GPU.search(line) is not None


def parse_line(line: str) -> tuple[str, Status | None]:
    """The service that a line of `up` comes from, and the status that it tells, if it does."""
    start, bar, said = line.partition("|")
    if not bar or not said.lstrip().startswith('{"status":'):
        return "", None
    with contextlib.suppress(msgspec.MsgspecError):
        return re.sub(r"[-_]\d+$", "", start.strip()), msgspec.json.decode(said, type=Status)
    return "", None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# --- a file to keep -------------------------------------------------------------------------------------------------


def render_for_hand(run: RunSpec, topology: Path, options: Mapping[str, str], files: Mapping[str, Path | None]) -> str:
    """The compose file by which a run of a topology file is started by hand; the client judges it and prints its table.

    `options` are the environment variables of what was asked, and `files` what was given by --trace or --calibration.
    Raises ConfigError for a path that compose cannot mount.
    """
    mounts, environment = [], dict(options)
    for name, file in {"topology": topology, **files}.items():
        if file is not None:
            target = Path(os.path.realpath(file))  # a link may lead out of its folder
            mounts.append(mount(target.parent, f"{name}:ro"))
            environment[f"PDEMU_{name.upper()}"] = f"{LAB}/{name}/{target.name}"
    return render(run, environment, mounts, f"./runs:{LAB}/runs")

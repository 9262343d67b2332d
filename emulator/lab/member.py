"""A member of a cluster without a launcher: a router, node or client started by itself, in a container or by hand.

Every member plans the run from the same options by the same code, so that all agree on it without being told; or it
reads the finished run from a file. A node that starts as root may shape first and then become somebody else, before
it opens a socket or hears a message.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import uvloop

from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError, DeadlineError
from emulator.core.hardware import Catalog
from emulator.core.listen import Listen
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.core.workload import plan_load
from emulator.lab.cpu import CpuSampler
from emulator.lab.devices import check_device, visible_gpus
from emulator.lab.experiment import calibrated
from emulator.lab.kept_kv import foresee_kv_bytes, granted_memory_bytes
from emulator.lab.launch import NO_LOAD, LiveResult, ready_limit_s
from emulator.lab.sites import CLIENT, ROUTER
from emulator.live import health
from emulator.live.allocator import NODE_ALLOCATOR_ENV
from emulator.live.nic import EmulatedNic
from emulator.live.process import live, metrics_server, tune
from emulator.live.reports import RunReport
from emulator.live.status import Assignment, Ready, Status

RETRY_S = 0.2
RESOLVE_S = 20.0

Kind = Literal["router", "node", "client"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the control network is kept: the run's secret and the router's CURVE keys, or nothing, on purpose."""

    secret: str = ""
    public_key: str = ""
    secret_key: str = ""
    insecure: bool = False

    def check(self, address: str) -> None:
        """Raises ConfigError unless an address beyond loopback has a secret and the router's key, or needs none."""
        if self.insecure or ipaddress.ip_address(address).is_loopback or (self.secret and self.public_key):
            return
        raise ConfigError(
            f"control address {address}: beyond loopback PDEMU_SECRET and PDEMU_ROUTER_PUBLIC_KEY must be set (`pdemu "
            "keys` makes them; the router needs PDEMU_ROUTER_SECRET_KEY too), or --insecure given on a network that "
            "nobody else reaches"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a process becomes once it no longer needs root."""

    uid: int
    gid: int

    @classmethod
    def parse(cls, text: str) -> Identity:
        """From `uid` or `uid:gid`, in numbers."""
        uid, _, gid = text.partition(":")
        if not (uid.isdecimal() and (gid or uid).isdecimal()):
            raise ConfigError(f"--user {text}: must be UID or UID:GID in numbers, such as 10001:10001")
        return cls(uid=int(uid), gid=int(gid or uid))

    def own(self, folder: Path) -> None:
        """Give a folder to this user, if this process may."""
        if os.geteuid() == 0:
            os.chown(folder, self.uid, self.gid)

    def become(self) -> None:
        """Be this user for good; raises ConfigError when that is not permitted."""
        if (os.geteuid(), os.getegid()) == (self.uid, self.gid):
            return
        try:
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)
        except PermissionError:
            raise ConfigError(f"--user {self.uid}:{self.gid}: only root may become another user") from None


def plan_member(
    topology: Topology, catalog: Catalog, traces: dict[str, Trace], deployment: str, *, verify_kv: bool, force: bool
) -> RunSpec:
    """The one run that the members make. Raises ConfigError when it is several, and whatever planning a run does."""
    load = plan_load(topology.workload, traces)
    topology, calibration = calibrated(topology)
    runs = plan_runs(
        topology,
        catalog,
        load,
        deployments=[deployment],
        verify_kv=verify_kv,
        force=force,
        calibration=calibration,
    )
    if len(runs) != 1:
        raise ConfigError(f"{topology.name}, {deployment}: members make one run; give one --kv-bandwidth")
    return runs[0]


def on_gpu(run: RunSpec, name: str, gpu: int | None) -> RunSpec:
    """The run as a node has it whose CUDA device has this number where it is, whatever the topology says."""
    if gpu is None:
        return run
    if run.device.kind != "cuda":
        raise ConfigError(f"--gpu {gpu}: the run's device is {run.device.kind}; give all members --device cuda")
    if gpu < 0:
        raise ConfigError(f"--gpu {gpu}: must be 0 or more")
    device = run.device.seen_from(_number(run, name), len(run.nodes), gpu)
    return msgspec.structs.replace(run, device=device)


def on_own_gpu(run: RunSpec, name: str) -> RunSpec:
    """The run as a node has it that nobody told of GPUs: it takes one of those here in turn, and has it for itself."""
    if run.device.kind != "cuda" or run.device.gpus:
        return run
    return on_gpu(run, name, _number(run, name) % visible_gpus())


def _number(run: RunSpec, name: str) -> int:
    return [node.name for node in run.nodes].index(name)


def new_secret() -> str:
    """What the members of one run prove themselves by."""
    return secrets.token_hex(16)


def reexec_for_memory() -> None:
    """Execute this command again with the allocator's settings, which are read at the start of a process."""
    if any(os.environ.get(name) != value for name, value in NODE_ALLOCATOR_ENV.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **NODE_ALLOCATOR_ENV})


# --- addresses ------------------------------------------------------------------------------------------------------


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port` or `host:port`; raises ConfigError for anything else."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} {text}: must be host:port, such as tcp://router:5555")
    return host.strip("[]"), int(port)


def resolve(host: str, limit_s: float) -> str:
    """The address of a host, whose name may appear only in a moment; raises DeadlineError when it does not."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"host {host} has no address after {limit_s:g} s: {error.strerror}") from None
            time.sleep(RETRY_S)


def own_address(network: str) -> str:
    """This machine's address in a network such as 10.1.2.0/24; raises ConfigError unless there is one."""
    try:
        wanted = ipaddress.ip_network(network)
    except ValueError as error:
        raise ConfigError(f"--kv-network {network}: {error}; give it as 10.1.2.0/24") from None
    present = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    inside = [address for address in present if ipaddress.ip_address(address) in wanted]
    if len(inside) != 1:
        raise ConfigError(
            f"--kv-network {network}: {len(inside)} addresses of this machine are in it; here are {', '.join(present)}"
        )
    return inside[0]


# --- living ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of a cluster: its run, who may reach it, as whom it lives, who is told how it goes, and where it
    serves metrics, unless it is the client."""

    run: RunSpec
    access: Access
    tell: Callable[[Status], None]
    identity: Identity | None = None
    kernel_shaping: bool = True
    metrics: Listen | None = None

    def route(self, listen: str) -> None:
        """Be the router at an address, until the run has ended."""
        host, port = parse_address(listen, "--listen")
        run = msgspec.structs.replace(
            self.run, load=NO_LOAD, router=msgspec.structs.replace(self.run.router, control_port=port)
        )
        self._settle()
        uvloop.run(self._live(self._task(ROUTER, "router", run, host, control_address=host)))

    def serve(self, name: str, router: str, kv_address: str) -> None:
        """Be a node with an address on the KV network, until the run has ended."""
        check_device(self.run.device.of_node(_number(self.run, name)), "members")
        granted = granted_memory_bytes(self.run)
        holders = self.run.kv_holders
        task = self._joining(
            name,
            "node",
            on_own_gpu(msgspec.structs.replace(self.run, load=NO_LOAD), name),
            router,
            kv_address=kv_address,
            host_memory_bytes=granted // max(1, len(holders)),
            expected_kv_bytes=foresee_kv_bytes(self.run, granted) if name in holders else 0,
        )
        nic = EmulatedNic.of(task, leave_shaped=self.identity is not None)
        self._settle()
        uvloop.run(self._live(task, nic))

    def client(self, router: str) -> ClientMember:
        """Be the client: what drives the run."""
        task = self._joining(CLIENT, "client", self.run, router)
        self._settle()
        return ClientMember(self, task)

    def _settle(self) -> None:
        """What needed root is done: become who this process lives as."""
        if self.identity is not None:
            self.identity.become()
        tune()

    def _joining(self, name: str, kind: Kind, run: RunSpec, router: str, **changes: Any) -> Assignment:
        host, port = parse_address(router, "--router")
        address = resolve(host, ready_limit_s(self.run))
        return self._task(name, kind, run, address, router_endpoint=f"tcp://{address}:{port}", **changes)

    def _task(self, name: str, kind: Kind, run: RunSpec, address: str, **changes: Any) -> Assignment:
        self.access.check(address)
        return Assignment(
            kind=kind,
            name=name,
            run=run,
            secret=self.access.secret,
            router_public_key=self.access.public_key,
            router_secret_key=self.access.secret_key if kind == "router" else "",
            insecure=self.access.insecure,
            kernel_shaping=self.kernel_shaping and run.link is not None,
            join_timeout_s=ready_limit_s(run),
            **changes,
        )

    async def _live(self, task: Assignment, nic: EmulatedNic | None = None) -> RunReport | None:
        def tell(status: Status) -> None:
            if isinstance(status, Ready):
                shaped = task.kv_address if task.kind == "node" and task.kernel_shaping else ""
                health.write([status.endpoint or task.router_endpoint], shaped)
            self.tell(status)

        metrics = metrics_server(self.metrics)
        if metrics is None:
            return await live(task, tell, nic)
        try:
            metrics.start()
            return await live(task, tell, nic, metrics=metrics)
        finally:
            metrics.close()


@dataclass(slots=True)
class ClientMember:
    """The client of a cluster that is there already, as a launcher of its run."""

    member: Member
    task: Assignment

    async def launch(self) -> LiveResult:
        """Join, drive the run and collect its reports."""
        with contextlib.ExitStack() as stack:
            cpu = CpuSampler()

            def tell(status: Status) -> None:
                if isinstance(status, Ready):
                    stack.enter_context(cpu)
                told(status)

            told, self.member.tell = self.member.tell, tell
            report = await self.member._live(self.task)
        assert report is not None, "a client returns the run's report"
        return LiveResult(report, tuple(cpu.busiest))


def stay() -> None:
    """Wait to be told to end, by SIGTERM or Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            signal.pause()

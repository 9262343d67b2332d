"""The lab that bench_shaping.py measures in: namespaces joined by two bridges, the processes there, and what was found.

One namespace a node, each with a leg on the control and on the KV bridge, as the netns launcher builds them. Where
there is a container engine, also nodes in containers of the lab's image on one internal network, as compose has them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, netns
from shaping_peers import Task

from emulator import __version__
from emulator.core.pacing import payload_bits_per_s
from emulator.live.allocator import NODE_ALLOCATOR_ENV

NODES = ("a", "b", "c")
PEERS = Path(__file__).resolve().with_name("shaping_peers.py")
IMAGE = f"pd-emulator:{__version__}"
DEADLINE_S = 180.0
_SAMPLE_S = 0.25
_IDLE_SHARE = 0.9


@dataclass
class Findings:
    """What was measured, for the last line, and which bounds were missed."""

    summary: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    drops: int = 0
    retransmits: int = 0
    congestion: set[str] = field(default_factory=set)
    delay_by: str = "receiver"

    def judge(self, what: str, value: float, bound: float, text: str) -> None:
        """Note a measured value and whether it is within ± its bound."""
        self.summary.append(f"{what} {text}")
        if not abs(value) <= bound:
            self.missed.append(f"{what}: {text}")

    def last_words(self, messages: list[dict[str, Any]], *, shaped: bool) -> None:
        """Add up what a process told at its end; its congestion control matters where the kernel shapes."""
        for message in messages:
            self.drops += message.get("drops", 0)
            self.retransmits += message.get("retransmits", 0)
            self.delay_by = message.get("delay_by", self.delay_by)
            if "congestion" in message and shaped:
                self.congestion.add(message["congestion"])


class Peer:
    """A process of shaping_peers.py."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._process = subprocess.Popen(
            _container_command(task) if task.container_network else [sys.executable, str(PEERS), task.json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **NODE_ALLOCATOR_ENV},
        )
        self._watchdog = threading.Timer(DEADLINE_S, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def hear(self) -> dict[str, Any]:
        """The next message; raises RuntimeError if the process ended or took too long."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.task.kind} process ended early or took more than {DEADLINE_S:.0f} s")
        return dict(json.loads(line))

    def tell(self, **order: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        """End the orders and wait; the process's last messages. Killed if it does not end."""
        self._watchdog.cancel()
        try:
            output, _ = self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        return [json.loads(line) for line in output.splitlines()]


def _container_command(task: Task) -> list[str]:
    """Run a process in a container of its own, with the right to shape there and nothing else."""
    command = ["docker", "run", "--rm", "--interactive", "--label", task.container_network]
    command += ["--network", task.container_network, "--ip", task.address, "--cap-add", "NET_ADMIN"]
    command += ["--volume", f"{PEERS.parent}:/tools:ro", "--entrypoint", "python"]
    for name, value in NODE_ALLOCATOR_ENV.items():
        command += ["--env", f"{name}={value}"]
    return [*command, IMAGE, f"/tools/{PEERS.name}", task.json()]


class Containers:
    """The engine's network on which nodes are containers, and the image that they are of."""

    def __init__(self) -> None:
        self.network = f"pdemu-bench-{os.getpid()}"
        self._made = False

    @staticmethod
    def there() -> bool:
        """Whether this machine has a container engine that answers."""
        return shutil.which("docker") is not None and _docker("info").returncode == 0

    @staticmethod
    def address(node: str) -> str:
        """A node's address on the network."""
        return f"10.96.0.{NODES.index(node) + 2}"

    def build(self) -> None:
        """Build the image and make the network; remove() takes the network away."""
        for arguments in (
            ("build", "--tag", IMAGE, str(PEERS.parents[1])),
            ("network", "create", "--internal", "--subnet", "10.96.0.0/24", self.network),
        ):
            done = _docker(*arguments)
            if done.returncode != 0:
                raise RuntimeError(f"`docker {' '.join(arguments)}` failed: {done.stderr.strip()}")
        self._made = True

    def remove(self) -> None:
        """Remove the network and whatever still runs on it."""
        if not self._made:
            return
        left = _docker("ps", "--all", "--quiet", "--filter", f"label={self.network}").stdout.split()
        if left:
            _docker("rm", "--force", *left)
        _docker("network", "rm", self.network)


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=900, check=False)


class Lab:
    """The namespaces: `net` with both bridges, and the nodes, each with a leg on either."""

    def __init__(self) -> None:
        self.containers = Containers() if Containers.there() else None
        self._tag = f"pdemu-bench-{os.getpid()}"
        self._made: list[str] = []

    def namespace(self, node: str) -> str:
        """A node's namespace."""
        return f"{self._tag}-{node}"

    @staticmethod
    def address(network: str, node: str) -> str:
        """A node's address on one of the two networks."""
        return f"10.{98 if network == 'ctl' else 97}.0.{NODES.index(node) + 2}"

    def build(self) -> None:
        """Make everything; remove() takes it away at whatever stage this ended."""
        if self.containers is not None:
            self.containers.build()
        for node in ("net", *NODES):
            netns.create(self.namespace(node))
            self._made.append(self.namespace(node))
        with IPRoute(netns=self.namespace("net")) as ip:
            for network in ("ctl", "kv"):
                ip.link("add", ifname=network, kind="bridge")
                bridge = ip.link_lookup(ifname=network)[0]
                ip.link("set", index=bridge, state="up")
                for node in NODES:
                    peer = {"ifname": network, "net_ns_fd": self.namespace(node)}
                    ip.link("add", ifname=f"{network}-{node}", kind="veth", peer=peer)
                    ip.link("set", index=ip.link_lookup(ifname=f"{network}-{node}")[0], master=bridge, state="up")
        for node in NODES:
            with IPRoute(netns=self.namespace(node)) as ip:
                for network in ("ctl", "kv"):
                    index = ip.link_lookup(ifname=network)[0]
                    ip.addr("add", index=index, address=self.address(network, node), prefixlen=24)
                    ip.link("set", index=index, state="up")

    def remove(self) -> None:
        """Remove what was made."""
        if self.containers is not None:
            self.containers.remove()
        for name in self._made:
            netns.remove(name)


@contextmanager
def peer(findings: Findings, task: Task) -> Iterator[Peer]:
    """A process that has ended when the block is left."""
    child = Peer(task)
    try:
        yield child
    finally:
        findings.last_words(child.end(), shaped=task.line_bps is not None)


def payload_bps(rate_bps: float) -> float:
    """What line rate leaves for payload."""
    return payload_bits_per_s(rate_bps, "line")


def node_task(lab: Lab, kind: str, node: str, rate_bps: float) -> Task:
    """One end in a node's namespace, shaped by the kernel to a line rate in both directions."""
    payload = payload_bps(rate_bps)
    return Task(kind, lab.address("kv", node), lab.namespace(node), line_bps=rate_bps, payload_bps=payload)


def container_task(lab: Lab, kind: str, node: str, rate_bps: float) -> Task:
    """One end in a container, shaped by the kernel to a line rate in both directions."""
    assert lab.containers is not None
    task = node_task(lab, kind, node, rate_bps)
    return replace(task, address=lab.containers.address(node), namespace="", container_network=lab.containers.network)


def paced_task(kind: str, rate_bps: float) -> Task:
    """One end on loopback, paced in user space."""
    return Task(kind, "127.0.0.1", paced_bps=payload_bps(rate_bps), payload_bps=payload_bps(rate_bps))


def pair(lab: Lab, column: str, rate_bps: float) -> tuple[Task, Task]:
    """Receiver and sender of a column of the table."""
    if column == "paced":
        return paced_task("link_rx", rate_bps), paced_task("link_tx", rate_bps)
    if column == "compose":
        return container_task(lab, "link_rx", "c", rate_bps), container_task(lab, "link_tx", "a", rate_bps)
    return node_task(lab, f"{column}_rx", "c", rate_bps), node_task(lab, f"{column}_tx", "a", rate_bps)


def wait_for_idle(patience_s: float) -> bool:
    """Wait until the machine's CPUs are nine tenths idle, but no longer than that; whether they are."""
    end_s = time.monotonic() + patience_s
    while True:
        before = _cpu_ticks()
        time.sleep(_SAMPLE_S)
        idle, total = (after - first for first, after in zip(before, _cpu_ticks(), strict=True))
        if idle >= _IDLE_SHARE * total:
            return True
        if time.monotonic() >= end_s:
            return False


def _cpu_ticks() -> tuple[int, int]:
    """Idle and all ticks of all CPUs since boot."""
    ticks = [int(text) for text in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)

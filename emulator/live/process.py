"""Entry of every process of a run: `python -m emulator.live.process`, its assignment on standard input.

The launcher holds the other end of standard input for as long as it lives. When it is gone, however it went, the
pipe closes and the process ends at once: nothing is left behind.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from emulator.core.errors import PdemuError
from emulator.core.listen import Listen
from emulator.core.probe import MAX_BYTES
from emulator.live import namespace
from emulator.live.client import ClientProcess, Progress
from emulator.live.heap import warm_heap
from emulator.live.listening import listening_socket
from emulator.live.nic import EmulatedNic
from emulator.live.node import NodeProcess
from emulator.live.reports import RunReport
from emulator.live.router import RouterProcess
from emulator.live.status import Assignment, Done, Failed, Ready, Status, Underway, Waiting

if TYPE_CHECKING:
    from emulator.live.metrics_server import MetricsServer

ORPHANED = 3
# A thread that wakes to a deadline waits at most this long for a thread that runs Python code.
SWITCH_INTERVAL_S = 2e-4


def tell(status: Status) -> None:
    """One status line to the launcher."""
    sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
    sys.stdout.buffer.flush()


class Leash:
    """Standard input: first the assignment, then nothing until its end, which is the end of this process."""

    def __init__(self) -> None:
        self.assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)

    def watch(self) -> None:
        """Start watching, in a thread of its own."""
        threading.Thread(target=self._run, name="leash", daemon=True).start()

    def _run(self) -> None:
        sys.stdin.buffer.read()
        os._exit(ORPHANED)


async def live(
    task: Assignment,
    tell: Callable[[Status], None],
    nic: EmulatedNic | None,
    listening: socket.socket | None = None,
    metrics: MetricsServer | None = None,
) -> RunReport | None:
    """Live through the run, telling how it goes. A client returns the run's report.

    A node's KV crosses `nic`; a client that serves HTTP does so at `listening`. `metrics` shows those of a router or a
    node.
    """
    url = metrics.url if metrics is not None else ""
    if task.kind == "router":
        router = RouterProcess(task, tell)
        if metrics is not None:
            router.expose(metrics)
        tell(Ready(router.endpoint, url))
        await router.serve()
        return None
    if task.kind == "node":
        spec = next(node for node in task.run.nodes if node.name == task.name)
        if spec.name in task.run.kv_receivers:
            kept_bytes = 0 if task.run.device.computes else task.expected_kv_bytes  # else it is the device's memory
            warm_heap(max(kept_bytes, 2 * MAX_BYTES))
        node = NodeProcess(task, spec, nic)
        await node.open(lambda what: tell(Waiting(what)))
        if metrics is not None:
            node.expose(metrics)
        await node.join(task.join_timeout_s)
        tell(Ready(node.kv_endpoint, url))
        await node.serve()
        return None
    if listening is not None:
        from emulator.live.http import HttpProcess  # noqa: PLC0415 - slow to import, and needed by this process alone

        endpoint = HttpProcess(task, listening, tell)
        await endpoint.join(task.join_timeout_s)
        tell(Ready(endpoint.endpoint))
        return await endpoint.serve()
    client = ClientProcess(task)
    await client.join(task.join_timeout_s)
    tell(Ready())

    def tell_progress(progress: Progress) -> None:
        tell(Underway(progress.now_s, progress.sent, progress.ended))

    return await client.drive(tell_progress)


def tune() -> None:
    """Make this interpreter fit to keep deadlines."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.disable()  # a collection would stall a step; a run is short and its objects are few


def metrics_server(listen: Listen | None) -> MetricsServer | None:
    """What serves metrics there, listening; None for nowhere. Raises ConfigError for a port that is taken."""
    if listen is None:
        return None
    from emulator.live.metrics_server import MetricsServer  # noqa: PLC0415 - slow to import, and few runs have metrics

    return MetricsServer(listen)


def main() -> int:
    """Be what the assignment says; the exit status is 0, or that of the error told."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    tune()
    leash = Leash()
    metrics = None
    try:
        metrics = metrics_server(leash.assignment.metrics)
        listening = listening_socket(leash.assignment.http) if leash.assignment.http is not None else None
        if leash.assignment.netns:
            namespace.enter(leash.assignment.netns)
        leash.watch()
        if metrics is not None:
            metrics.start()
        nic = EmulatedNic.of(leash.assignment) if leash.assignment.kind == "node" else None
        report = uvloop.run(live(leash.assignment, tell, nic, listening, metrics))
        if report is not None:
            Path(leash.assignment.report).write_bytes(msgspec.json.encode(report))
        tell(Done())
    except PdemuError as error:
        tell(Failed(type(error).__name__, str(error)))
        return error.exit_code
    except Exception as error:
        logging.exception("unexpected")
        tell(Failed(type(error).__name__, str(error)))
        return 1
    finally:
        if metrics is not None:
            metrics.close()
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    os._exit(code)

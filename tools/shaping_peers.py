"""The processes that bench_shaping.py starts: one end of a KV link, of a plain socket or of a ping each.

Each moves into its network namespace, shapes its interface there as a node does, and takes orders as JSON lines on
standard input; what it saw goes out as JSON lines. When the orders end it undoes its shaping and tells its counts.
Usage: shaping_peers.py JSON-OF-Task.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyroute2 import netns

from emulator.core.pacing import MAX_FRAME_BYTES, frame_bytes_for
from emulator.core.shaping import ShapePlan
from emulator.live import shaping
from emulator.live.kv_link import Arrival, KvReceiver, KvSender
from emulator.live.timers import sharpen_timers

_HEADER = struct.Struct("<QQd")
_PING_BYTES = 64
_PING_GAP_S = 1e-3


@dataclass(frozen=True)
class Task:
    """What one process is: its kind, where it is, how it is shaped, and the tickets it takes.

    A process is in the network namespace `namespace`, or in a container on the engine's network `container_network`.
    Rates in bits per second: `line_bps` shapes the interface, `paced_bps` the KV link itself; `payload_bps` is what
    either leaves for payload and sizes the frames.
    """

    kind: str
    address: str
    namespace: str = ""
    container_network: str = ""
    line_bps: float | None = None
    paced_bps: float | None = None
    payload_bps: float | None = None
    delay_s: float = 0.0
    endpoint: str = ""
    tickets: tuple[tuple[int, int], ...] = ()

    @property
    def frame_bytes(self) -> int:
        """As a node chooses it."""
        rate = None if self.payload_bps is None else self.payload_bps / 8
        return frame_bytes_for(rate, kernel_shaped=self.line_bps is not None)

    @property
    def paced_bytes_per_s(self) -> float | None:
        """None where the kernel shapes."""
        return None if self.paced_bps is None else self.paced_bps / 8

    def json(self) -> str:
        """As the command line carries it."""
        return json.dumps(asdict(self))


def say(**message: Any) -> None:
    """Tell the parent, in one write: threads may speak at once."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def orders() -> Iterator[dict[str, Any]]:
    """The parent's orders, until it closes the pipe."""
    for line in sys.stdin:
        yield json.loads(line)


def link_rx(task: Task, delay_s: float) -> None:
    def complete(arrival: Arrival) -> None:
        receiver.release(arrival.ticket)
        say(ticket=arrival.ticket, nbytes=arrival.nbytes, start_s=arrival.start_s, end_s=arrival.end_s)

    receiver = KvReceiver(
        f"tcp://{task.address}:*",
        ingress_bytes_per_s=task.paced_bytes_per_s,
        frame_bytes=task.frame_bytes,
        shaped_elsewhere=task.paced_bytes_per_s is None,
        delay_s=delay_s,
        host_memory_bytes=1 << 30,
        on_complete=complete,
    )
    for ticket, nbytes in task.tickets:
        receiver.open(ticket, nbytes)
    say(endpoint=receiver.endpoint)
    for _ in orders():
        pass
    receiver.close()


def link_tx(task: Task, _: float) -> None:
    sender = KvSender(
        egress_bytes_per_s=task.paced_bytes_per_s,
        frame_bytes=task.frame_bytes,
        shaped_elsewhere=task.paced_bytes_per_s is None,
    )
    sender.connect(task.endpoint)
    say(ready=True)
    for order in orders():
        sender.send(task.endpoint, order["ticket"], order["nbytes"])
    say(congestion=_congestion_to(task.endpoint))
    sender.close()


def sockets_rx(task: Task, _: float) -> None:
    buffer = bytearray(MAX_FRAME_BYTES)
    with socket.create_server((task.address, 0)) as listener:
        say(endpoint=f"tcp://{task.address}:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            while header := connection.recv(_HEADER.size, socket.MSG_WAITALL):
                ticket, nbytes, start_s = _HEADER.unpack(header)
                left = nbytes
                while left:
                    left -= connection.recv_into(buffer, min(left, len(buffer)))
                say(ticket=ticket, nbytes=nbytes, start_s=start_s, end_s=time.monotonic())


def sockets_tx(task: Task, _: float) -> None:
    source = memoryview(os.urandom(MAX_FRAME_BYTES))
    with socket.create_connection(_host_and_port(task.endpoint)) as connection:
        say(ready=True)
        for order in orders():
            left = order["nbytes"]
            connection.sendall(_HEADER.pack(order["ticket"], left, time.monotonic()))
            while left:
                piece = source[: min(left, len(source))]
                connection.sendall(piece)
                left -= len(piece)
        say(congestion=shaping.congestion_of(connection))


def ping_rx(task: Task, _: float) -> None:
    with socket.create_server((task.address, 0)) as listener:
        say(endpoint=f"tcp://{task.address}:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while message := connection.recv(_PING_BYTES, socket.MSG_WAITALL):
                connection.sendall(message)


def ping_tx(task: Task, _: float) -> None:
    """Ping once a millisecond until the time ordered is over; tell each round trip in seconds."""
    sharpen_timers()
    with socket.create_connection(_host_and_port(task.endpoint)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        say(ready=True)
        for order in orders():
            trips: list[float] = []
            end_s = time.monotonic() + order["seconds"]
            while (start_s := time.monotonic()) < end_s:
                connection.sendall(bytes(_PING_BYTES))
                connection.recv(_PING_BYTES, socket.MSG_WAITALL)
                trips.append(time.monotonic() - start_s)
                time.sleep(_PING_GAP_S)
            say(trips=trips)


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def _congestion_to(endpoint: str) -> str:
    """The congestion control of this process's connection to an endpoint, whoever holds it."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername() == _host_and_port(endpoint):
                return shaping.congestion_of(connection)
    return "no connection"


KINDS: dict[str, Callable[[Task, float], None]] = {
    "link_rx": link_rx,
    "link_tx": link_tx,
    "sockets_rx": sockets_rx,
    "sockets_tx": sockets_tx,
    "ping_rx": ping_rx,
    "ping_tx": ping_tx,
}


def main() -> None:
    """Be the end that the command line describes."""
    fields = json.loads(sys.argv[1])
    task = Task(**{**fields, "tickets": tuple(tuple(ticket) for ticket in fields["tickets"])})
    if task.namespace:
        netns.setns(task.namespace, flags=0)
    if task.line_bps is None:
        KINDS[task.kind](task, task.delay_s)
        return
    plan = ShapePlan(task.address, egress_bps=task.line_bps, ingress_bps=task.line_bps, delay_s=task.delay_s)
    applied = shaping.apply(plan)
    try:
        KINDS[task.kind](task, task.delay_s if applied.delay_by == "receiver" else 0.0)
        counts = shaping.counters(applied)
        drops = sum(direction.drops for direction in (counts.egress, counts.ingress) if direction is not None)
        say(delay_by=applied.delay_by, drops=drops, retransmits=counts.retransmitted_segments)
    finally:
        shaping.undo(applied)


if __name__ == "__main__":
    main()

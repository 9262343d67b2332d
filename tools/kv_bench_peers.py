"""The processes that bench_kv_link.py starts: one end of one kind of connection each.

Both ends warm up before they say that they are ready, so start-up and first-touch costs stay outside the
timed window. Usage: kv_bench_peers.py KIND {rx,tx} JSON-OF-Plan; results are JSON lines on standard output.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

from emulator.live.kv_link import Arrival, KvReceiver, KvSender

SOURCE_BYTES = 16 * 1024 * 1024
"""Every kind sends from random buffers of this much in all, so none profits from a warmer cache."""
HIGH_WATER = 16


@dataclass(frozen=True)
class Plan:
    """What both ends of one run agree on; sizes in bytes, the rate in payload bytes per second.

    `store`: keep what arrives until a ticket's bytes are there, as KV blocks must be, rather than drop each
    frame at once; `buffer`: kernel buffers of plain sockets (0: the system's choice).
    """

    total: int
    warm: int
    frame: int
    ticket: int
    store: bool = True
    buffer: int = 0
    rate: float | None = None
    senders: int = 1
    sender: int = 0
    endpoint: str = ""

    def tickets(self, sender: int) -> tuple[dict[int, int], dict[int, int]]:
        """Ticket -> bytes that a sender uses for the warm-up, and for the timed window."""
        return (
            {sender << 32 | i: size for i, size in enumerate(_split(self.warm, self.ticket))},
            {sender << 32 | 1 << 31 | i: size for i, size in enumerate(_split(self.total, self.ticket))},
        )


def _split(total: int, size: int) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]


class Usage:
    """This process's CPU seconds, and the growth of its memory since the object was made."""

    def __init__(self) -> None:
        gc.collect()
        self._linux = Path("/proc/self/status").exists()
        if self._linux:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # begin a new VmHWM
        self._before = self._status("VmRSS")
        self.restart_cpu()

    def restart_cpu(self) -> None:
        """Count CPU seconds from now."""
        self._cpu_s = self._cpu_now_s()

    def report(self) -> dict[str, float]:
        """CPU seconds, and peak growth in bytes."""
        return {"cpu_s": self._cpu_now_s() - self._cpu_s, "growth": self._status("VmHWM") - self._before}

    @staticmethod
    def _cpu_now_s() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def _status(self, key: str) -> int:
        if not self._linux:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise KeyError(key)


def say(**message: Any) -> None:
    """Tell the parent."""
    print(json.dumps(message), flush=True)


def hear() -> None:
    """Wait for the parent's next line; end if it is gone."""
    if not sys.stdin.readline():
        sys.exit(1)


def _give(plan: Plan, usage: Usage, push: Any) -> None:
    """The sending side of every kind: push(nbytes-map) for the warm-up, then timed, then until told to stop."""
    warm, timed = plan.tickets(plan.sender)
    push(warm)
    say(ready=True)
    hear()
    usage.restart_cpu()
    start_s = time.monotonic()
    push(timed)
    hear()
    say(start_s=start_s, **usage.report())


def link_tx(plan: Plan) -> None:
    sender = KvSender(egress_bytes_per_s=plan.rate)
    sender.connect(plan.endpoint)
    usage = Usage()

    def push(tickets: dict[int, int]) -> None:
        for ticket, nbytes in tickets.items():
            sender.send(plan.endpoint, ticket, nbytes)

    _give(plan, usage, push)
    sender.close()


def link_rx(plan: Plan) -> None:
    done = threading.Event()
    arrivals: list[Arrival] = []
    per_sender = [plan.tickets(sender) for sender in range(plan.senders)]
    warm = {t: n for tickets, _ in per_sender for t, n in tickets.items()}
    timed = {t: n for _, tickets in per_sender for t, n in tickets.items()}
    waiting = dict(warm)

    def complete(arrival: Arrival) -> None:
        receiver.release(arrival.ticket)
        if arrival.ticket in timed:
            arrivals.append(arrival)
        del waiting[arrival.ticket]
        if not waiting:
            done.set()

    receiver = KvReceiver(
        "tcp://127.0.0.1:*",
        ingress_bytes_per_s=plan.rate,
        host_memory_bytes=1 << 30 if plan.store else 0,
        on_complete=complete,
    )
    for ticket, nbytes in {**warm, **timed}.items():
        receiver.open(ticket, nbytes)
    usage = Usage()
    say(endpoint=receiver.endpoint)
    done.wait()
    waiting.update(timed)
    done.clear()
    usage.restart_cpu()
    say(ready=True)
    done.wait()
    end_s = time.monotonic()
    stats = receiver.stats()
    assert stats.dropped == 0, stats
    assert not plan.store or stats.unretained_bytes == 0, stats
    times = [(a.start_s, a.end_s, a.nbytes) for a in arrivals]
    say(end_s=end_s, arrivals=times, **usage.report())
    receiver.close()


def zmq_tx(plan: Plan) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push_socket = context.socket(zmq.PUSH)
    push_socket.sndhwm = HIGH_WATER
    push_socket.connect(plan.endpoint)
    frames = [zmq.Frame(os.urandom(plan.frame), copy=True) for _ in range(SOURCE_BYTES // plan.frame)]
    usage = Usage()

    def push(tickets: dict[int, int]) -> None:
        count = len(frames)
        for i in range(sum(tickets.values()) // plan.frame):
            push_socket.send(frames[i % count], copy=False)

    _give(plan, usage, push)
    context.destroy(linger=0)


def zmq_rx(plan: Plan) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.rcvhwm = HIGH_WATER
    pull.bind("tcp://127.0.0.1:*")
    usage = Usage()

    def take(nbytes: int) -> None:
        kept: list[zmq.Frame] = []
        kept_bytes = 0
        while nbytes > 0:
            frame = pull.recv(copy=False)
            length = len(frame)
            nbytes -= length
            if plan.store:
                kept.append(frame)
                kept_bytes += length
                if kept_bytes >= plan.ticket:
                    kept.clear()
                    kept_bytes = 0

    _receive(plan, usage, pull.getsockopt_string(zmq.LAST_ENDPOINT), take)
    context.destroy(linger=0)


def sockets_tx(plan: Plan) -> None:
    host, port = plan.endpoint.rsplit(":", 1)
    connection = socket.socket()
    if plan.buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, plan.buffer)
    connection.connect((host, int(port)))
    source = memoryview(os.urandom(SOURCE_BYTES))
    pieces = [source[at : at + plan.frame] for at in range(0, SOURCE_BYTES, plan.frame)]
    usage = Usage()

    def push(tickets: dict[int, int]) -> None:
        count = len(pieces)
        for i in range(sum(tickets.values()) // plan.frame):
            connection.sendall(pieces[i % count])

    _give(plan, usage, push)
    connection.close()


def sockets_rx(plan: Plan) -> None:
    listener = socket.socket()
    if plan.buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, plan.buffer)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    buffer = bytearray(plan.frame)
    usage = Usage()
    accepted: list[socket.socket] = []

    def take(nbytes: int) -> None:
        if not accepted:
            accepted.append(listener.accept()[0])
        connection = accepted[0]
        while nbytes > 0:
            nbytes -= connection.recv_into(buffer)

    _receive(plan, usage, f"127.0.0.1:{listener.getsockname()[1]}", take)
    accepted[0].close()
    listener.close()


def _receive(plan: Plan, usage: Usage, endpoint: str, take: Any) -> None:
    say(endpoint=endpoint)
    take(plan.warm)
    usage.restart_cpu()
    say(ready=True)
    take(plan.total)
    say(end_s=time.monotonic(), **usage.report())


def main() -> None:
    """Run the end that the command line names."""
    kind, side, plan = sys.argv[1:]
    ends = {
        ("link", "rx"): link_rx,
        ("link", "tx"): link_tx,
        ("zmq", "rx"): zmq_rx,
        ("zmq", "tx"): zmq_tx,
        ("sockets", "rx"): sockets_rx,
        ("sockets", "tx"): sockets_tx,
    }
    ends[kind, side](Plan(**json.loads(plan)))


def plan_json(plan: Plan) -> str:
    """A plan as the command line carries it."""
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    main()

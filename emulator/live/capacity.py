"""One end of a short test of what KV links this machine carries: `python -m emulator.live.capacity` with `receive` or
`send ENDPOINT ENDPOINT`.

The receiver prints its two endpoints, then, when all has come, the payload bits per second, its own CPU seconds a byte,
and by how many seconds a transfer at a rate is late; the sender, when its standard input ends, its CPU seconds a byte.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

from emulator.live.cpu_time import CpuTime
from emulator.live.heap import warm_heap
from emulator.live.kv_link import Arrival, KvReceiver, KvSender

TRANSFER_BYTES = 64 << 20
TRANSFERS = 40
WARM_TRANSFERS = 8
BEYOND_BYTES_PER_S = 1e12
"""A rate that no machine reaches: frames are accounted for one by one, as on a link with a rate, but never wait."""


LATE_BYTES_PER_S = 1e9
LATE_BYTES = 4 << 20
LATE_TRANSFERS = 25
LATE_GAP_S = 0.012
"""Transfers of 4 ms, one by one, to see what each takes beyond its bytes."""


def receive() -> None:
    """Take the transfers in, each dropped when it is complete; the first few warm everything up and do not count."""
    late_s: list[float] = []

    def complete_late(arrival: Arrival) -> None:
        paced.release(arrival.ticket)
        late_s.append(arrival.end_s - arrival.start_s - arrival.nbytes / LATE_BYTES_PER_S)

    paced = KvReceiver(
        "tcp://127.0.0.1:*",
        ingress_bytes_per_s=LATE_BYTES_PER_S,
        host_memory_bytes=4 * TRANSFER_BYTES,
        on_complete=complete_late,
    )
    for ticket in range(LATE_TRANSFERS):
        paced.open(ticket, LATE_BYTES)
    warm_heap(4 * TRANSFER_BYTES)
    cpu = CpuTime()
    done = threading.Event()
    arrivals: list[Arrival] = []

    def complete(arrival: Arrival) -> None:
        receiver.release(arrival.ticket)
        arrivals.append(arrival)
        if len(arrivals) == WARM_TRANSFERS:
            cpu.start()
        if len(arrivals) == TRANSFERS:
            done.set()

    receiver = KvReceiver(
        "tcp://127.0.0.1:*",
        ingress_bytes_per_s=BEYOND_BYTES_PER_S,
        host_memory_bytes=4 * TRANSFER_BYTES,
        on_complete=complete,
    )
    for ticket in range(TRANSFERS):
        receiver.open(ticket, TRANSFER_BYTES)
    _tell(f"{receiver.endpoint} {paced.endpoint}")
    done.wait()
    counted = arrivals[WARM_TRANSFERS:]
    seconds = counted[-1].end_s - arrivals[WARM_TRANSFERS - 1].end_s
    nbytes = len(counted) * TRANSFER_BYTES
    _tell(f"{nbytes * 8 / seconds!r} {cpu.seconds / nbytes!r} {statistics.median(late_s)!r}")
    receiver.close()
    paced.close()


def send(endpoint: str, paced_endpoint: str) -> None:
    """Send the transfers, wait to be ended, and tell what the many at full speed cost."""
    paced = KvSender(egress_bytes_per_s=LATE_BYTES_PER_S)
    for ticket in range(LATE_TRANSFERS):
        paced.send(paced_endpoint, ticket, LATE_BYTES)
        time.sleep(LATE_GAP_S)
    paced.close()
    cpu = CpuTime()
    sender = KvSender(egress_bytes_per_s=BEYOND_BYTES_PER_S)
    cpu.start()
    for ticket in range(TRANSFERS):
        sender.send(endpoint, ticket, TRANSFER_BYTES)
    sys.stdin.read()
    _tell(repr(cpu.seconds / (TRANSFERS * TRANSFER_BYTES)))
    sender.close()


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], sys.argv[3])

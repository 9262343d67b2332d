"""What a KV sender keeps of each receiver: its socket, and the lane of the parts that are for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from emulator.core.deployments import TransferOrder
from emulator.core.errors import ConfigError
from emulator.core.kv_lanes import Lane, Message
from emulator.live.kv_frames import queued_messages, socket_buffer_bytes
from emulator.live.kv_places import KvSource


@dataclass(slots=True, eq=False)
class SentPart(Message):
    """One message of a transfer: `nbytes` of `source` from `offset` on, its part `number`; its request is the `ticket`.

    `pair_bytes_per_s`: the most that the link to its receiver carries, None where that is not known.
    """

    ticket: int
    nbytes: int
    offset: int
    number: int
    pair_bytes_per_s: float | None
    queued_s: float
    source: KvSource
    sent: int = 0
    cancelled: bool = False

    @property
    def begins(self) -> bool:
        """Whether the first byte of its transfer is yet to be sent, and is one of its own."""
        return self.offset == 0 and self.sent == 0

    @property
    def ready_s(self) -> float:
        """From when on its bytes may be on the wire."""
        return max(self.queued_s, self.due_s)


class Destination:
    """A receiver's endpoint. `flowing` are the parts whose bytes go, the next one first."""

    __slots__ = ("_through_s", "blocked", "flowing", "lane", "send", "socket", "unblocked_s")

    def __init__(self, push: zmq.Socket[bytes], max_in_flight: int, order: TransferOrder) -> None:
        self.socket = push
        # the extension's own method: the class's wrapper and the look-up cost as much as sending a frame
        self.send: Callable[..., object] = super(zmq.Socket, push).send
        self.lane: Lane[SentPart] = Lane(max_in_flight, order)
        self.flowing = self.lane.flowing
        self.blocked = False
        self.unblocked_s = 0.0
        self._through_s = 0.0

    def through_s(self, part: SentPart, handed_s: float) -> float:
        """When a part is through at the earliest whose last byte the socket has taken at `handed_s`.

        A kernel that shapes the link, or a receiver whose card is slower, has some of it still before it then.
        """
        if part.pair_bytes_per_s is not None:
            started_s = max(self._through_s, part.ready_s)
            self._through_s = max(handed_s, started_s + part.nbytes / part.pair_bytes_per_s)
            return self._through_s
        return handed_s


def connected(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, frame_bytes: int, *, unlimited: bool
) -> zmq.Socket[bytes]:
    """A socket that sends to `endpoint`; raises ConfigError for one that is not an address."""
    push = context.socket(zmq.PUSH)
    push.linger = 0
    push.sndhwm = queued_messages(frame_bytes, unlimited=unlimited, sending=True)
    push.sndbuf = socket_buffer_bytes(frame_bytes)
    push.immediate = True
    push.reconnect_ivl = 50
    try:
        push.connect(endpoint)
    except zmq.ZMQError as error:
        push.close()
        raise ConfigError(f"cannot send KV to {endpoint!r}: {error}; it must read tcp://HOST:PORT") from error
    return push

"""The messages from one node to another: which wait, which are on the way, and whose bytes flow.

    add ──▶ waiting ──(a place is free)──▶ on the way: its cost passes ──▶ due ──▶ its bytes flow ──▶ remove

The link as a model (`core.link`) and the sender on a real one (`live.kv_sender`) ask the same lane. A request has at
most one message on the way, and `max_in_flight` requests have one. Of the requests with a message waiting and none on
the way, `fifo` gives a free place to the one whose next message was ready first, `fair` to the one that has waited for
its turn longest; it queues up anew after each message. A request whose next message is not there yet has no place.

Costs pass side by side. Of what is due, `fifo` lets one message flow at a time, to its end: the one that was ready
first. `fair` lets all flow at once. So the limit matters to `fifo` only where messages cost time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from emulator.core.deployments import TransferOrder


@dataclass(slots=True, eq=False)
class Message:
    """Bytes of a request that leave together, `message_s` after they have taken a place.

    `due_s`: from when on they may flow; no limit where the message costs nothing. `serial`: in which order it was
    ready; `turn`: when it is its request's turn, the lowest first.
    """

    request: Hashable
    message_s: float
    due_s: float = field(default=-math.inf, init=False)
    serial: int = field(default=0, init=False)
    turn: int = field(default=0, init=False)


M = TypeVar("M", bound=Message)


class Lane(Generic[M]):
    """The messages of one ordered pair of nodes. `flowing` are those whose bytes flow, in an order that means nothing.

    Calls may name instants in any order. Raises ValueError unless at least one may be in flight.
    """

    __slots__ = ("_count", "_fair", "_held", "_on_the_way", "_places", "_turns", "_waiting", "flowing")

    def __init__(self, max_in_flight: int = 1, order: TransferOrder = "fifo") -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be 1 or more, not {max_in_flight}")
        self.flowing: list[M] = []
        self._places = max_in_flight
        self._fair = order == "fair"
        self._on_the_way: dict[Hashable, M] = {}
        self._held: list[M] = []  # on the way, but their bytes do not flow yet
        self._waiting: dict[Hashable, list[M]] = {}
        self._turns: list[tuple[int, int, M]] = []  # a heap; entries of what no longer waits are passed over
        self._count = 0

    def __iter__(self) -> Iterator[M]:
        return itertools.chain(self._on_the_way.values(), *self._waiting.values())

    @property
    def idle(self) -> bool:
        """Whether there is no message at all."""
        return not self._on_the_way

    def of(self, request: Hashable) -> list[M]:
        """The messages of one request, in their order."""
        first = self._on_the_way.get(request)
        return [*([] if first is None else [first]), *self._waiting.get(request, ())]

    def add(self, message: M, now_s: float) -> bool:
        """The message is ready; True if it takes a place, False if it waits for one."""
        request = message.request
        on_the_way, waiting = self._on_the_way, self._waiting
        self._count += 1
        message.serial = message.turn = self._count
        if request not in on_the_way and request not in waiting and len(on_the_way) < self._places:
            self._take_place(message, now_s)
            return True
        if request in waiting:
            waiting[request].append(message)
            return False
        waiting[request] = [message]
        if request not in on_the_way:
            self._line_up(message)
        return False

    def remove(self, message: M, now_s: float) -> None:
        """The message is through, or dropped at whatever stage; its place goes to the next one."""
        request = message.request
        if self._on_the_way.get(request) is message:
            del self._on_the_way[request]
            (self.flowing if message in self.flowing else self._held).remove(message)
            if request in self._waiting:
                following = self._waiting[request][0]
                if self._fair:
                    self._count += 1
                    following.turn = self._count
                self._line_up(following)
            if self._turns:
                self._fill(now_s)
            return
        queue = self._waiting[request]
        was_next = queue[0] is message
        queue.remove(message)
        if not queue:
            del self._waiting[request]
        elif was_next and request not in self._on_the_way:
            if self._fair:
                queue[0].turn = message.turn
            self._line_up(queue[0])

    def flow(self, now_s: float) -> Sequence[M]:
        """Let flow what is due and may; returns what begins now, which is at the end of `flowing`."""
        held, flowing = self._held, self.flowing
        if not held or (flowing and not self._fair):
            return ()
        begun = [message for message in held if message.due_s <= now_s]
        if not self._fair and len(begun) > 1:
            begun = [min(begun, key=_serial)]
        for message in begun:
            held.remove(message)
        flowing += begun
        return begun

    def next_due_s(self) -> float:
        """When `flow` will let more flow if nothing else happens before; infinite for never."""
        if not self._held or (self.flowing and not self._fair):
            return math.inf
        return min(message.due_s for message in self._held)

    def check_integrity(self) -> None:
        """Assert that places are used as far as they can be, by one message a request, and that `fifo` sends one."""
        assert len(self._on_the_way) <= self._places, "too many requests have a message on the way"
        there = {id(message) for message in (*self._held, *self.flowing)}
        assert there == {id(message) for message in self._on_the_way.values()}, "a message is on the way twice or lost"
        assert len(there) == len(self._held) + len(self.flowing), "a message both waits for its cost and flows"
        assert self._fair or len(self.flowing) <= 1, "more than one message flows"
        assert all(self._waiting.values()), "an empty queue is kept"
        idle = self._waiting.keys() - self._on_the_way.keys()
        assert not idle or len(self._on_the_way) == self._places, "a place is free and a request waits for it"
        if idle:
            lined_up = Counter(id(message) for _, _, message in self._turns)
            assert all(lined_up[id(self._waiting[request][0])] == 1 for request in idle), "a request has no turn"

    def _line_up(self, message: M) -> None:
        heapq.heappush(self._turns, (message.turn, message.serial, message))

    def _take_place(self, message: M, now_s: float) -> None:
        if message.message_s > 0:
            message.due_s = now_s + message.message_s
        self._on_the_way[message.request] = message
        self._held.append(message)

    def _fill(self, now_s: float) -> None:
        """Give free places to those whose turn it is."""
        while self._turns and len(self._on_the_way) < self._places:
            message = heapq.heappop(self._turns)[-1]
            queue = self._waiting.get(message.request)
            if queue is None or queue[0] is not message:
                continue
            if len(queue) == 1:
                del self._waiting[message.request]
            else:
                del queue[0]
            self._take_place(message, now_s)


def _serial(message: Message) -> int:
    return message.serial

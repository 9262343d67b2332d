"""What a node's engine or the router wants done. They decide; a driver (live or simulated) carries it out in order."""

from __future__ import annotations

import msgspec

from emulator.core.cost import StepShape
from emulator.core.messages import Message
from emulator.core.records import MemoryRecord, StepRecord, TimeRun


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Send this message to the router."""

    message: Message


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send this message of the router to that peer."""

    peer: str
    message: Message


class KvWrite(msgspec.Struct, frozen=True, gc=False):
    """A step computes bytes `offset` … `offset + nbytes` of a request's KV, which lies in `blocks` in this order."""

    request_id: str
    offset: int
    nbytes: int
    blocks: tuple[int, ...]


class RunStep(msgspec.Struct, frozen=True, gc=False):
    """Run a step on the device from `start_s` for `planned_s` model seconds, then call `step_done`.

    `progress` are shares of the step, rising and below 1, at which `step_progress` is to be called. `writes` is the KV
    of its chunks, where blocks have names.
    """

    start_s: float
    planned_s: float
    shape: StepShape
    progress: tuple[float, ...] = ()
    writes: tuple[KvWrite, ...] = ()

    @property
    def end_s(self) -> float:
        """When the step is to end."""
        return self.start_s + self.planned_s

    def progress_s(self) -> list[float]:
        """The instants of `progress`."""
        return [self.start_s + share * self.planned_s for share in self.progress]


class RecordStep(msgspec.Struct, frozen=True, gc=False):
    """A step has ended, or several alike one after the other."""

    record: StepRecord


class RecordMemory(msgspec.Struct, frozen=True, gc=False):
    """What the node's KV memory was since the last such effect, in order of time."""

    rows: tuple[MemoryRecord, ...]


class TokenRun(msgspec.Struct, frozen=True, gc=False):
    """A request's attempt got `tokens` tokens, one at each of these instants (in place of a message for every step)."""

    request_id: str
    times: list[float | TimeRun]
    tokens: int


class Transmit(msgspec.Struct, frozen=True, gc=False):
    """Hand bytes `offset` … `offset + nbytes` of a request's KV (of `total` bytes) to the link to `destination`.

    They lie in `blocks`, where blocks have names.
    """

    request_id: str
    ticket: int
    endpoint: str
    destination: str
    offset: int
    nbytes: int
    total: int
    blocks: tuple[int, ...] = ()


class CancelTransmit(msgspec.Struct, frozen=True, gc=False):
    """Forget what has not left yet under this ticket."""

    ticket: int


class OpenTicket(msgspec.Struct, frozen=True, gc=False):
    """Exactly `nbytes` KV bytes of a request may arrive under this ticket, from node `source`.

    They belong into `blocks`, where blocks have names.
    """

    request_id: str
    ticket: int
    nbytes: int
    source: str = ""
    blocks: tuple[int, ...] = ()


class CloseTicket(msgspec.Struct, frozen=True, gc=False):
    """The ticket is dead and the KV received under it may be dropped."""

    ticket: int


Effect = Reply | RunStep | RecordStep | RecordMemory | TokenRun | Transmit | CancelTransmit | OpenTicket | CloseTicket

"""What a node's engine wants done. The engine decides; a driver (live or simulated) carries these out in order."""

from __future__ import annotations

from dataclasses import dataclass

from emulator.core.cost import StepShape
from emulator.core.messages import Message
from emulator.core.records import StepRecord


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this message to the router."""

    message: Message


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a step on the device from `start_s` for `planned_s` model seconds, then call `step_done`."""

    start_s: float
    planned_s: float
    shape: StepShape


@dataclass(frozen=True, slots=True)
class RecordStep:
    """A step has ended."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class Transmit:
    """Hand bytes `offset` … `offset + nbytes` of a request's KV (of `total` bytes) to the link."""

    request_id: str
    ticket: int
    endpoint: str
    offset: int
    nbytes: int
    total: int


@dataclass(frozen=True, slots=True)
class CancelTransmit:
    """Forget what has not left yet under this ticket."""

    ticket: int


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Exactly `nbytes` KV bytes of a request may arrive under this ticket."""

    request_id: str
    ticket: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CloseTicket:
    """The ticket is dead and the KV received under it may be dropped."""

    ticket: int


Effect = Reply | RunStep | RecordStep | Transmit | CancelTransmit | OpenTicket | CloseTicket

"""What each process of a run hands over when it ends, and how it travels: in pieces over the control network.

No launcher needs a folder that all processes share; the client ends up with everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from emulator.core.errors import ProtocolError
from emulator.core.messages import Report
from emulator.core.probe import Probe
from emulator.core.records import MemoryRecord, Record, StepRecord
from emulator.core.run_summary import EndedBy
from emulator.core.workload import LoadPlan

PIECE_BYTES = 1 << 20
MAX_REPORT_BYTES = 1 << 30

T = TypeVar("T", bound=msgspec.Struct)


class TransferRow(msgspec.Struct, frozen=True):
    """One transfer as its receiver saw it: the parts' (start, end, bytes) in model seconds and wire bytes.

    It went from node `source` to `node`, for an attempt at a request that has its id or begins with it.
    """

    request_id: str
    node: str
    parts: tuple[tuple[float, float, int], ...]
    source: str = ""


class KvReport(msgspec.Struct, frozen=True, kw_only=True):
    """What went through one node's end of the KV network. Bytes on the wire; `blocked_s` in model seconds.

    `stray_frames` came under a ticket that was closed, as those of an aborted request do; `dropped_frames` for any
    other reason. Packets that the kernel's shaping dropped and TCP segments sent again are counted where the kernel
    shapes.
    """

    transfers: tuple[TransferRow, ...] = ()
    received_bytes: int = 0
    unretained_bytes: int = 0
    peak_retained_bytes: int = 0
    dropped_frames: int = 0
    stray_frames: int = 0
    blocked_s: float = 0.0
    qdisc_drops: int = 0
    tcp_retransmits: int = 0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's steps, memory over time, transfers and loop lag (model seconds).

    `clock_uncertainty_s`: how far off its clock may be from the router's, model seconds; 0 on the router's host.
    `cpu_s` are CPU seconds of its process during the run. `device` is what its steps were computed on, in words, and
    `device_id` the same for all processes that computed on the same piece of hardware.
    """

    name: str
    steps: tuple[StepRecord, ...]
    kv: KvReport
    loop_lag_s: tuple[float, ...]
    preemptions: int
    clock_uncertainty_s: float = 0.0
    cpu_s: float = 0.0
    memory: tuple[MemoryRecord, ...] = ()
    device: str = ""
    device_id: str = ""


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The router's loop lag (model seconds) and CPU seconds, what it ignored or never finished, and whom it lost.

    `abandoned` are the requests of guests that did not hand in records of theirs (`live.guests`).
    """

    loop_lag_s: tuple[float, ...]
    ignored_messages: int
    unended_requests: int
    lost_nodes: tuple[str, ...] = ()
    abandoned: tuple[Record, ...] = ()
    cpu_s: float = 0.0


class GuestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the requests of a client that joined beside the run's own, in the run's model seconds."""

    records: tuple[Record, ...]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run as the client has it in the end; lag and the uncertainty of its clock in model seconds.

    `load` is what came, where the requests were others' and the run had no load of its own. Its record was `ended_by`.
    """

    records: tuple[Record, ...]
    probes: tuple[Probe, ...]
    loop_lag_s: tuple[float, ...]
    router: RouterReport
    nodes: tuple[NodeReport, ...]
    clock_uncertainty_s: float = 0.0
    client_cpu_s: float = 0.0
    load: LoadPlan | None = None
    ended_by: EndedBy = "load"

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes of the run while it lasted."""
        return self.client_cpu_s + self.router.cpu_s + sum(node.cpu_s for node in self.nodes)


def pieces(name: str, report: msgspec.Struct) -> Iterator[Report]:
    """The report of process `name` in messages of bounded size."""
    data = msgspec.json.encode(report)
    for start in range(0, len(data), PIECE_BYTES):
        yield Report(name, data[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(data))


class ReportCollector:
    """Puts the pieces of several reports together."""

    def __init__(self) -> None:
        self._data: dict[str, bytearray] = {}
        self._whole: set[str] = set()

    def add(self, piece: Report) -> None:
        """Take the next piece; raises ProtocolError when a report grows beyond all bounds."""
        data = self._data.setdefault(piece.name, bytearray())
        data += piece.data
        if len(data) > MAX_REPORT_BYTES:
            raise ProtocolError(f"the report of {piece.name} is above {MAX_REPORT_BYTES} bytes")
        if piece.last:
            self._whole.add(piece.name)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those whose reports are not complete."""
        return [name for name in names if name not in self._whole]

    def others(self, names: Iterable[str]) -> list[str]:
        """Whose reports are complete besides these."""
        return sorted(self._whole - set(names))

    def get(self, name: str, kind: type[T]) -> T:
        """A complete report."""
        return msgspec.json.decode(self._data[name], type=kind)

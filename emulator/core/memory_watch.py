"""When a node's KV memory is worth a row: after what hands KV over, and once a second after whatever else changed it.

That blocks are taken and freed by those who compute, `StepRecord.kv_blocks_used` says of every step. What nobody could
tell from steps is memory in which nobody computes: set aside for KV on its way, or kept until the KV is fetched.
"""

from __future__ import annotations

from itertools import starmap

from emulator.core.effects import Effect, RecordMemory
from emulator.core.incoming import Incoming
from emulator.core.records import MemoryRecord
from emulator.core.scheduler import Scheduler

_Row = tuple[str, float, int, int, int, int, int]


class MemoryWatch:
    """Looks at one node's memory when a row is `due`; keeps rows as tuples until it is asked, since they are many."""

    def __init__(self, node: str, scheduler: Scheduler, incoming: Incoming) -> None:
        self.due = False
        self._node = node
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._held = scheduler.held
        self._incoming = incoming
        self._last: _Row = (node, 0.0, 0, 0, 0, 0, 0)
        self._rows: list[_Row] = []

    def note(self, now_s: float) -> None:
        """A row from now on; a clock that is read late does not bring it before the last one."""
        self.due = False
        last_s, pool, scheduler = self._last[1], self._pool, self._scheduler
        self._last = row = (
            self._node,
            now_s if now_s > last_s else last_s,
            pool.num_blocks - pool.free_blocks,
            pool.reserved_blocks,
            self._held.blocks,
            self._incoming.waiting,
            len(scheduler.waiting) + len(scheduler.held_back),
        )
        self._rows.append(row)

    def tick(self, now_s: float) -> list[Effect]:
        """A row if anything is another than in the last one; and all that have not been told."""
        last = self._last
        self.note(now_s)
        if self._last[2:] == last[2:]:
            self._last = last
            self._rows.pop()
        return self.tell()

    def tell(self) -> list[Effect]:
        """The rows that have not been told."""
        if not self._rows:
            return []
        rows = tuple(starmap(MemoryRecord, self._rows))
        self._rows.clear()
        return [RecordMemory(rows)]

"""What a run leaves behind: one record a request, one a step. Every number in a report is a fold over these.

Rows of equal shape may be written as one: a `TimeRun` stands for many instants, a `StepRecord` with `steps` above 1
for many steps. Whoever reads them sees no difference (`expand_all`, `expand_steps`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Outcome = Literal["completed", "failed", "unfinished"]
StepKind = Literal["prefill", "decode", "mixed"]


class TimeRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`n` instants in one row: the first at `t0_s`, then gaps of first_step_s, first_step_s + delta_s, …"""

    t0_s: float
    first_step_s: float
    delta_s: float
    n: int


def expand_times(times: Sequence[float | TimeRun]) -> NDArray[np.float64]:
    """All instants of a mixed list of single values and runs, in seconds, in order."""
    return expand_all([times])[0]


def expand_all(rows: Sequence[Sequence[float | TimeRun]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The instants of many such lists one after the other, in seconds, and how many each list has."""
    flat = list(itertools.chain.from_iterable(rows))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if not any(isinstance(entry, TimeRun) for entry in flat):
        return np.array(flat, dtype=np.float64), lengths
    runs = [entry if isinstance(entry, TimeRun) else TimeRun(entry, 0.0, 0.0, 1) for entry in flat]
    counts = np.array([run.n for run in runs], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)])
    j = np.arange(ends[-1], dtype=np.float64) - np.repeat(ends[:-1], counts)
    instants = np.repeat([run.t0_s for run in runs], counts)
    instants += j * np.repeat([run.first_step_s for run in runs], counts)
    instants += np.repeat([run.delta_s for run in runs], counts) * j * (j - 1) / 2
    return instants, np.diff(ends[np.concatenate([[0], np.cumsum(lengths)])])


class RequestTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, gc=False):
    """Instants of a request's life inside the cluster, model seconds from the start of the run; None = not reached.

    `queued_s`: arrived at the node that prefills it. `admitted_s`: its ticket came, which the prefill had to wait for
    (admission `decode_reserve_first`). `prefill_start_s`/`prefill_end_s`: start of the first and end of the last step
    that computed its prompt the first time. `kv_ready_s`: its (last) KV bytes were computed *and* a ticket was at hand,
    so the link had them; where they are read, they could have been. `kv_start_s`/`kv_end_s`: first byte began on the
    wire, last byte counted at the decode node.
    `streamed_s`: its first token was there to be streamed, where that is not when the KV has arrived: at the end of its
    prefill, or of the step in which the decode node computed the prompt's last token again (`first_token`). `kv_bytes`:
    bytes counted at the decode node.

    All these are of its first hand-over. `preemptions`: how often it lost its memory on the node that decodes it;
    `kv_bytes_again`: bytes that were moved for it after that, because its prompt was prefilled anew.
    """

    queued_s: float | None = None
    admitted_s: float | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    kv_ready_s: float | None = None
    kv_start_s: float | None = None
    kv_end_s: float | None = None
    streamed_s: float | None = None
    kv_bytes: int | None = None
    preemptions: int = 0
    kv_bytes_again: int = 0

    def merged(self, later: RequestTimes) -> RequestTimes:
        """These instants with those of `later` laid over them; counts add up."""
        return RequestTimes(
            queued_s=self.queued_s if later.queued_s is None else later.queued_s,
            admitted_s=self.admitted_s if later.admitted_s is None else later.admitted_s,
            prefill_start_s=self.prefill_start_s if later.prefill_start_s is None else later.prefill_start_s,
            prefill_end_s=self.prefill_end_s if later.prefill_end_s is None else later.prefill_end_s,
            kv_ready_s=self.kv_ready_s if later.kv_ready_s is None else later.kv_ready_s,
            kv_start_s=self.kv_start_s if later.kv_start_s is None else later.kv_start_s,
            kv_end_s=self.kv_end_s if later.kv_end_s is None else later.kv_end_s,
            streamed_s=self.streamed_s if later.streamed_s is None else later.streamed_s,
            kv_bytes=self.kv_bytes if later.kv_bytes is None else later.kv_bytes,
            preemptions=self.preemptions + later.preemptions,
            kv_bytes_again=self.kv_bytes_again + later.kv_bytes_again,
        )


class Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One request as the client saw it, with what the cluster said of it. Model seconds from the start of the run.

    `token_times_s` has one instant per output token received at the client. `kv_start_s`…`kv_end_s` cover the
    transfer on the wire. `outcome` is `completed`, `failed` (with `reason`) or `unfinished` (cut at the deadline).

    Nodes, bytes and instants are those of the first hand-over. `preemptions` counts how often the request lost its
    memory on the node that decodes it; where it was prefilled anew for that, `kv_bytes_again` moved for it besides.
    """

    request_id: str
    stream: str
    scheduled_s: float
    sent_s: float | None
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    first_token_s: float | None
    finish_s: float | None
    token_times_s: list[float | TimeRun]
    prefill_node: str | None
    decode_node: str | None
    kv_bytes: int
    kv_start_s: float | None
    kv_end_s: float | None
    outcome: Outcome
    reason: str
    queued_s: float | None = None
    admitted_s: float | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    kv_ready_s: float | None = None
    streamed_s: float | None = None
    preemptions: int = 0
    kv_bytes_again: int = 0

    def times(self) -> NDArray[np.float64]:
        """Instants of all output tokens, in seconds."""
        return expand_times(self.token_times_s)


class StepRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, gc=False):
    """One step of one node's device; `planned_s` is the cost model's duration, lateness = end − start − planned.

    A row may stand for `steps` alike that follow each other without a break: it starts with the first and ends with
    the last, each was planned to take `delta_s` longer than the one before, the first `planned_s`, and
    `kv_blocks_used` is that of the last.
    """

    node: str
    kind: StepKind
    start_s: float
    end_s: float
    planned_s: float
    prefill_tokens: int
    decode_batch: int
    requests: int
    kv_blocks_used: int = 0
    steps: int = 1
    delta_s: float = 0.0

    @property
    def whole_planned_s(self) -> float:
        """What all steps of the row were planned to take, seconds."""
        return self.steps * (self.planned_s + self.delta_s * (self.steps - 1) / 2)

    @property
    def lateness_s(self) -> float:
        """How much later than planned the (last) step ended, seconds."""
        return self.end_s - self.start_s - self.whole_planned_s


class MemoryRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True, gc=False):
    """A node's KV memory from `at_s` on, model seconds: blocks, and requests that wait.

    `used_blocks` are all that somebody holds. Among them `reserved_blocks` are set aside for KV that has not arrived,
    and `held_blocks` hold the KV of prompts computed here that has not been fetched yet. `waiting_for_memory` are
    requests that have no blocks for their KV yet, `waiting_for_prefill` those that wait to be computed here. What
    is 0 is left out of a written row.
    """

    node: str
    at_s: float
    used_blocks: int = 0
    reserved_blocks: int = 0
    held_blocks: int = 0
    waiting_for_memory: int = 0
    waiting_for_prefill: int = 0


def expand_steps(rows: Iterable[StepRecord]) -> Iterator[StepRecord]:
    """The steps that the rows stand for, one by one."""
    for row in rows:
        if row.steps == 1:
            yield row
            continue
        bounds = expand_times([TimeRun(row.start_s, row.planned_s, row.delta_s, row.steps), row.end_s]).tolist()
        for j, (start_s, end_s) in enumerate(itertools.pairwise(bounds)):
            planned_s = row.planned_s + j * row.delta_s
            yield msgspec.structs.replace(row, start_s=start_s, end_s=end_s, planned_s=planned_s, steps=1, delta_s=0.0)


def write_rows(rows: Iterable[Record | StepRecord | MemoryRecord]) -> bytes:
    """Rows as JSON lines."""
    return msgspec.json.Encoder().encode_lines(rows)


def read_records(data: bytes) -> list[Record]:
    """Records from JSON lines; raises msgspec.ValidationError for a row that is not one."""
    return msgspec.json.Decoder(Record).decode_lines(data)


def read_steps(data: bytes) -> list[StepRecord]:
    """Steps from JSON lines; raises msgspec.ValidationError for a row that is not one."""
    return msgspec.json.Decoder(StepRecord).decode_lines(data)


def read_memory(data: bytes) -> list[MemoryRecord]:
    """Rows of memory from JSON lines; raises msgspec.ValidationError for a row that is not one."""
    return msgspec.json.Decoder(MemoryRecord).decode_lines(data)


def numbered(records: Sequence[Record]) -> list[Record]:
    """The records, each with an id of its own: the second of a name is `name#2`."""
    times: Counter[str] = Counter()
    found = []
    for record in records:
        times[record.request_id] += 1
        n = times[record.request_id]
        found.append(record if n == 1 else msgspec.structs.replace(record, request_id=f"{record.request_id}#{n}"))
    return found

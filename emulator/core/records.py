"""What a run leaves behind: one record a request, one a step. Every number in a report is a fold over these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Outcome = Literal["completed", "failed", "unfinished"]
StepKind = Literal["prefill", "decode", "mixed"]


class TimeRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`n` instants in one row: the first at `t0_s`, then gaps of first_step_s, first_step_s + delta_s, …"""

    t0_s: float
    first_step_s: float
    delta_s: float
    n: int


def expand_times(times: Sequence[float | TimeRun]) -> NDArray[np.float64]:
    """All instants of a mixed list of single values and runs, in seconds, in order."""
    try:
        return np.array(times, dtype=np.float64)
    except TypeError:
        return np.concatenate([_instants(entry) for entry in times])


def _instants(entry: float | TimeRun) -> NDArray[np.float64]:
    if not isinstance(entry, TimeRun):
        return np.array([entry], dtype=np.float64)
    j = np.arange(entry.n, dtype=np.float64)
    return entry.t0_s + j * entry.first_step_s + entry.delta_s * j * (j - 1) / 2


class RequestTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Instants of a request's life inside the cluster, model seconds from the start of the run; None = not reached.

    `queued_s`: arrived at the node that prefills it. `prefill_start_s`/`prefill_end_s`: start of the first and end
    of the last step that computed its prompt the first time. `kv_ready_s`: its (last) KV bytes were computed *and*
    a ticket was at hand, so the link had them. `kv_start_s`/`kv_end_s`: first byte began on the wire, last byte
    counted at the decode node. `kv_bytes`: bytes counted there.
    """

    queued_s: float | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    kv_ready_s: float | None = None
    kv_start_s: float | None = None
    kv_end_s: float | None = None
    kv_bytes: int | None = None

    def merged(self, later: RequestTimes) -> RequestTimes:
        """These instants with those of `later` laid over them."""
        known = {f: v for f in later.__struct_fields__ if (v := getattr(later, f)) is not None}
        return msgspec.structs.replace(self, **known)


class Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One request as the client saw it, with what the cluster said of it. Model seconds from the start of the run.

    `token_times_s` has one instant per output token received at the client. `kv_start_s`…`kv_end_s` cover the
    transfer on the wire. `outcome` is `completed`, `failed` (with `reason`) or `unfinished` (cut at the deadline).
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
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    kv_ready_s: float | None = None

    def times(self) -> NDArray[np.float64]:
        """Instants of all output tokens, in seconds."""
        return expand_times(self.token_times_s)


class StepRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One step of one node's device; `planned_s` is the cost model's duration, lateness = end − start − planned."""

    node: str
    kind: StepKind
    start_s: float
    end_s: float
    planned_s: float
    prefill_tokens: int
    decode_batch: int
    requests: int
    kv_blocks_used: int = 0

    @property
    def lateness_s(self) -> float:
        """How much later than planned the step ended, seconds."""
        return self.end_s - self.start_s - self.planned_s


def write_rows(rows: Iterable[Record | StepRecord]) -> bytes:
    """Rows as JSON lines."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(row) + b"\n" for row in rows)


def read_records(data: bytes) -> list[Record]:
    """Records from JSON lines; raises msgspec.ValidationError for a row that is not one."""
    return msgspec.json.Decoder(Record).decode_lines(data)


def read_steps(data: bytes) -> list[StepRecord]:
    """Steps from JSON lines; raises msgspec.ValidationError for a row that is not one."""
    return msgspec.json.Decoder(StepRecord).decode_lines(data)

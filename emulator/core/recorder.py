"""What a client notes of each request while a run goes on; the records that come of it."""

from __future__ import annotations

from emulator.core.effects import TokenRun
from emulator.core.messages import Finished, Tokens
from emulator.core.placement import request_id_of
from emulator.core.records import Record, TimeRun
from emulator.core.workload import PlannedRequest

END = "the end of the record"
"""What cuts the record of a cluster that serves, whether it is stopped or enough is recorded."""


class Recorder:
    """One record a request. Instants are model seconds on the client's clock."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._closed = False
        self.strays = 0

    def sent(self, request: PlannedRequest, now_s: float) -> None:
        """A request was sent."""
        self._records[request.request_id] = Record(
            request_id=request.request_id,
            stream=request.stream,
            scheduled_s=request.scheduled_s,
            sent_s=now_s,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            output_tokens=0,
            first_token_s=None,
            finish_s=None,
            token_times_s=[],
            prefill_node=None,
            decode_node=None,
            kv_bytes=0,
            kv_start_s=None,
            kv_end_s=None,
            outcome="unfinished",
            reason="",
        )

    def tokens(self, message: Tokens, now_s: float) -> None:
        """Tokens arrived."""
        for request_id, n in ((t.request_id, t.n) for t in message.tokens):
            record = self._records.get(request_id)
            if record is None or record.finish_s is not None or self._closed:
                self.strays += n
                continue
            if record.first_token_s is None:
                record.first_token_s = now_s
            record.output_tokens += n
            record.token_times_s.extend([now_s] * n)

    def token_run(self, run: TokenRun) -> None:
        """Tokens arrived at all instants of a run, which names the attempt."""
        record = self._records.get(request_id_of(run.request_id))
        if record is None or record.finish_s is not None or self._closed:
            self.strays += run.tokens
            return
        if record.first_token_s is None:
            first = run.times[0]
            record.first_token_s = first.t0_s if isinstance(first, TimeRun) else first
        record.output_tokens += run.tokens
        record.token_times_s += run.times

    def finished(self, message: Finished, now_s: float) -> None:
        """A request ended, well or badly; after the cut only its places and times are noted."""
        record = self._records.get(message.request_id)
        if record is None or record.finish_s is not None:
            self.strays += 1
            return
        record.prefill_node, record.decode_node = message.prefill_node, message.decode_node
        times = message.times
        record.queued_s, record.admitted_s, record.streamed_s = times.queued_s, times.admitted_s, times.streamed_s
        record.prefill_start_s, record.prefill_end_s = times.prefill_start_s, times.prefill_end_s
        record.kv_ready_s, record.kv_start_s, record.kv_end_s = times.kv_ready_s, times.kv_start_s, times.kv_end_s
        record.kv_bytes, record.kv_bytes_again = times.kv_bytes or 0, times.kv_bytes_again
        record.preemptions = times.preemptions
        if self._closed:
            return
        ended_well = message.reason in ("length", "stop")
        last = record.token_times_s[-1] if ended_well and record.token_times_s else now_s
        record.finish_s = now_s if isinstance(last, TimeRun) else last  # word of the end may come later than the token
        record.outcome = "completed" if ended_well else "failed"
        record.reason = message.detail or ("" if ended_well else message.reason)

    def cut(self, now_s: float, what: str = "the drain deadline", *, keep: int | None = None) -> None:
        """At `what`, whatever has not ended by now is unfinished, for good; all but the first `keep` are forgotten."""
        self._closed = True
        for request_id in list(self._records)[keep:] if keep is not None else ():
            del self._records[request_id]
        for record in self._records.values():
            if record.finish_s is None:
                record.reason = f"not finished at {now_s:.3f} s, {what}"

    def records(self) -> list[Record]:
        """All records, in the order of sending."""
        return list(self._records.values())

"""One request as a load generator saw it, by whatever driver it was sent; its record comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from emulator.core.records import Outcome, Record
from emulator.core.workload import PlannedRequest


@dataclass(slots=True)
class ChunkCounts:
    """What a stream consisted of.

    `token_chunks` carry text; `role_chunks` announce the role and nothing else, `empty_chunks` carry nothing,
    `finish_chunks` only the reason why the output ended, `usage_chunks` only token counts. `without_done` streams ended
    without `[DONE]`, which is no failure where a reason to finish came.
    """

    token_chunks: int = 0
    role_chunks: int = 0
    empty_chunks: int = 0
    finish_chunks: int = 0
    usage_chunks: int = 0
    comments: int = 0
    without_done: int = 0

    def add(self, other: ChunkCounts) -> None:
        """Count those of another stream too."""
        for counted in fields(self):
            setattr(self, counted.name, getattr(self, counted.name) + getattr(other, counted.name))


@dataclass(slots=True)
class Seen:
    """What came back: the instant of each piece of output, and what the server said of itself (None: nothing).

    `reason` is a few words by which failures are counted, `message` says what is known besides.
    """

    token_times_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    reason: str = ""
    message: str = ""
    text: list[str] = field(default_factory=list)
    counts: ChunkCounts = field(default_factory=ChunkCounts)

    def fail(self, reason: str, message: str = "") -> None:
        """The request has failed; the first reason stands."""
        if not self.reason:
            self.reason, self.message = reason, message


@dataclass(slots=True)
class Exchange:
    """A request and its answer; seconds from the start of the run.

    It was due at its scheduled instant or, where `max_concurrency` kept it back, when a place became free; what passes
    from `due_s` to `sent_s` is the load generator's own delay. It has ended at `end_s`, well if `seen` has no reason.
    """

    number: int
    request: PlannedRequest
    due_s: float
    sent_s: float | None = None
    end_s: float | None = None
    seen: Seen = field(default_factory=Seen)

    @property
    def outcome(self) -> Outcome:
        """How it ended; `unfinished` if the run was interrupted before it did."""
        if self.seen.reason:
            return "failed"
        return "unfinished" if self.end_s is None else "completed"

    @property
    def output_tokens(self) -> int:
        """Output tokens: the server's count, or one for each chunk of text where it gives none."""
        stated = self.seen.output_tokens
        return len(self.seen.token_times_s) if stated is None else stated

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens: the server's count, or those that were asked for."""
        stated = self.seen.prompt_tokens
        return self.request.prompt_tokens if stated is None else stated

    def record(self) -> Record:
        """As it stands in `records.jsonl`; of what happens inside the server nothing is known."""
        times = self.seen.token_times_s
        return Record(
            request_id=self.request.request_id,
            stream=self.request.stream,
            scheduled_s=self.request.scheduled_s,
            sent_s=self.sent_s,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.request.max_tokens,
            output_tokens=self.output_tokens,
            first_token_s=times[0] if times else None,
            finish_s=times[-1] if self.outcome == "completed" else self.end_s,
            token_times_s=list(times),
            prefill_node=None,
            decode_node=None,
            kv_bytes=0,
            kv_start_s=None,
            kv_end_s=None,
            outcome=self.outcome,
            reason=": ".join(part for part in (self.seen.reason, self.seen.message) if part),
        )

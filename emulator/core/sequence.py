"""Requests as one node computes them, and the steps of a device that compute some of them each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from emulator.core.cost import Chunk, StepShape
from emulator.core.effects import KvWrite
from emulator.core.records import StepKind


class Status(Enum):
    """Where a request stands on a node."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting for remote KVs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_LENGTH = "finished: length"
    FINISHED_ABORTED = "finished: aborted"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request as one node computes it. `computed` tokens have their KV here; `generated` counts output tokens.

    Its blocks hold at least `held_tokens`, so that the pool is asked only for more. `ended`: it has left the node, or
    been given up: what `gives_up` does not stay to be computed again when it is preempted. `leaves_in_parts`: its KV is
    sent to another node before it is whole.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    hand_over: bool = False
    gives_up: bool = False
    leaves_in_parts: bool = False
    status: Status = Status.WAITING
    computed: int = 0
    generated: int = 0
    prefilled: bool = False
    preemptions: int = 0
    held_tokens: int = 0
    ended: bool = False

    @property
    def known(self) -> int:
        """Tokens whose values are known: the prompt and what has been generated."""
        return self.prompt_tokens + self.generated


class Step(msgspec.Struct, frozen=True):
    """What the device does next: prompt tokens to compute by sequence, and the sequences that decode one token."""

    chunks: tuple[tuple[Sequence, int], ...]
    decodes: tuple[Sequence, ...]

    @property
    def kind(self) -> StepKind:
        """`prefill`, `decode` or `mixed`."""
        if not self.decodes:
            return "prefill"
        return "mixed" if self.chunks else "decode"

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed in this step."""
        return sum(tokens for _, tokens in self.chunks)

    def shape(self) -> StepShape:
        """The counts that the cost model needs."""
        return StepShape(
            chunks=tuple([Chunk(tokens, sequence.computed) for sequence, tokens in self.chunks]),
            decode_batch=len(self.decodes),
            decode_context_sum=sum([sequence.computed for sequence in self.decodes]) + len(self.decodes),
        )

    def writes(self, bytes_per_token: int, blocks_of: Callable[[str], tuple[int, ...]]) -> tuple[KvWrite, ...]:
        """The KV of its chunks, each into the blocks of its request."""
        return tuple(
            KvWrite(s.request_id, s.computed * bytes_per_token, tokens * bytes_per_token, blocks_of(s.request_id))
            for s, tokens in self.chunks
        )


class StepResult(msgspec.Struct, frozen=True):
    """What a completed step brought: sequences with one new token each, those of them that have all their tokens now,
    and those whose prompt is now computed."""

    tokens: list[Sequence]
    full: list[Sequence]
    prefilled: list[Sequence]

"""Step times interpolated in a table of measured ones.

Between two measured sizes a time is interpolated linearly. Beyond the largest there is none: a node keeps its limits
within the table (`StepLimits`), longer requests are refused, and a step that came to be there all the same raises an
error. A prompt shorter than the shortest measured is refused too; what is left of a prompt in a smaller chunk takes as
long as the smallest measured, which is too slow rather than too fast.

    one chunk        the larger of a prompt of its length, and what its prompt takes with it less what it took without
    several          their tokens in `prefill_batched` and what each takes more for its context, but at least as long as
                     the longest alone
    decode           the batch in `decode`, times what one sequence takes at the mean context in `decode_contexts` over
                     what it takes at `decode_context`: both lines are measured, their product is an assumption, which
                     takes the KV of many long sequences for too little
    both             a p-norm of the prefill and one sequence's decode, as a fitted profile has it, and in full what the
                     other sequences add
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from functools import cached_property
from typing import NamedTuple

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.hardware import Line, StepTable
from emulator.core.step_shape import Chunk, StepShape, mixed_ms


class StepLimits(NamedTuple):
    """Within what a cost model knows step times; `name` says whose limits these are."""

    name: str = ""
    max_num_batched_tokens: int = sys.maxsize
    max_num_seqs: int = sys.maxsize
    min_prompt_tokens: int = 1
    max_tokens: int = sys.maxsize

    def setting(self, key: str, given: int | None, default: int) -> int:
        """A pool's limit: what it is given, else the default as far as the table goes."""
        most: int = getattr(self, key)
        if given is not None and given > most:
            raise ConfigError(f"{key} = {given} is beyond the steps measured in table {self.name}; use at most {most}")
        return min(default, most) if given is None else given

    def below(self, prompt_tokens: int) -> str:
        """How a prompt is shorter than the table knows, or nothing."""
        if prompt_tokens >= self.min_prompt_tokens:
            return ""
        return f"lies below the {self.min_prompt_tokens} from which table {self.name} was measured"

    def beyond(self, tokens: int) -> str:
        """How so many tokens of a request are more than the table knows, or nothing."""
        if tokens <= self.max_tokens:
            return ""
        return f"lie beyond the {self.max_tokens} tokens up to which table {self.name} was measured"


class TableCost(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="cost", tag="table", dict=True
):
    """Step times from a table of measured ones (see the module)."""

    profile: StepTable

    @property
    def limits(self) -> StepLimits:
        """Within what the table holds step times."""
        table = self.profile
        longest = table.prefill[-1][0]
        if table.decode_contexts is not None:
            longest = min(longest, table.decode_contexts[-1][0])
        return StepLimits(
            name=table.name,
            max_num_batched_tokens=self.batched[-1][0],
            max_num_seqs=table.decode[-1][0],
            min_prompt_tokens=table.prefill[0][0],
            max_tokens=longest,
        )

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step; 0 for a step without work."""
        prefill_ms = self._prefill_ms(shape.chunks) if shape.chunks else 0.0
        if not shape.decode_batch:
            return prefill_ms * 1e-3
        decode_ms = self._decode_ms(shape.decode_batch, shape.decode_context_sum)
        if not shape.chunks:
            return decode_ms * 1e-3
        base_ms = self.profile.decode[0][1]
        return (mixed_ms(prefill_ms, base_ms) + max(decode_ms - base_ms, 0.0)) * 1e-3

    def decode_steps_s(self, batch: int, context_sum: int, most: int) -> list[float]:
        """Seconds of up to `most` decode steps of `batch` sequences in a row, as `step_s` has them to the last bit.

        The first attends to `context_sum` tokens, each further one to `batch` more, so between two measured contexts
        times rise by equal amounts; the list ends there, and has at least one.
        """
        line = self.profile.decode_contexts
        if line is None:
            return [self._decode_ms(batch, context_sum) * 1e-3] * most
        after = bisect_right(line, (context_sum / batch, math.inf))
        if after == len(line):
            return [self._decode_ms(batch, context_sum) * 1e-3]
        high, high_ms = line[after]
        most = min(most, -(-(high * batch - context_sum) // batch))
        if after == 0:
            return [self._decode_ms(batch, context_sum) * 1e-3] * most
        low, low_ms = line[after - 1]
        rows_ms, reference_ms = self._at("decode", self.profile.decode, batch), self._reference_ms
        rise_ms, span = high_ms - low_ms, high - low
        contexts = range(context_sum, context_sum + most * batch, batch)
        return [rows_ms * (low_ms + rise_ms * ((n / batch - low) / span)) / reference_ms * 1e-3 for n in contexts]

    def _decode_ms(self, batch: int, context_sum: int) -> float:
        table = self.profile
        ms = self._at("decode", table.decode, batch)
        if table.decode_contexts is not None:
            ms = ms * self._at("decode_contexts", table.decode_contexts, context_sum / batch) / self._reference_ms
        return ms

    def _prefill_ms(self, chunks: tuple[Chunk, ...]) -> float:
        tokens = 0
        longest = longer = 0.0
        for n, context in chunks:
            tokens += n
            alone = own = self._at("prefill", self.profile.prefill, n)
            if context:
                alone = max(own, self._prompt_ms(context + n) - self._prompt_ms(context))
            longest, longer = max(longest, alone), longer + alone - own
        if len(chunks) == 1:
            return longest
        return max(longest, self._at("prefill_batched", self.batched, tokens) + longer)

    def _prompt_ms(self, tokens: int) -> float:
        return self._at("prefill", self.profile.prefill, tokens)

    def _at(self, key: str, line: Line, size: float) -> float:
        """The time at a size: between two measured ones on a straight line, below the first the first."""
        after = bisect_right(line, (size, math.inf))
        if after == 0:
            return line[0][1]
        low, low_ms = line[after - 1]
        if size == low:
            return low_ms
        if after == len(line):
            raise ConfigError(f"table {self.profile.name}: {key} was measured up to {low}, not to {size:g}")
        high, high_ms = line[after]
        return low_ms + (high_ms - low_ms) * ((size - low) / (high - low))

    @cached_property
    def batched(self) -> Line:
        """Prefill of several prompts: as measured, and below that as one prompt of as many tokens."""
        several = self.profile.prefill_batched
        if several is None:
            return self.profile.prefill
        return (*(pair for pair in self.profile.prefill if pair[0] < several[0][0]), *several)

    @property
    def least_context_share(self) -> float:
        """What a decode step takes at least, at any context, of what it takes at `decode_context`."""
        line = self.profile.decode_contexts
        return 1.0 if line is None else min(ms for _, ms in line) / self._reference_ms

    @cached_property
    def _reference_ms(self) -> float:
        """One sequence at the context of `decode`, by the line over contexts."""
        assert self.profile.decode_contexts is not None
        return self._at("decode_contexts", self.profile.decode_contexts, self.profile.decode_context)

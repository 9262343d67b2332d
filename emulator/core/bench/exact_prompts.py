"""Prompts of exactly so many tokens, from how many tokens each word has.

Tokenizers of large models split text at spaces first, so a text has the tokens of its words, and a fixed number around
them (a beginning, a chat's template). Whether that holds for a server's, two texts that it counted tell; where it does
not, prompts are as close as `core.bench.prompts.Calibration` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emulator.core.bench.prompts import POOL_WORDS, WORDS, PromptPool

FURTHEST = 64
"""How many tokens at the end of a prompt are chosen to fit, at most."""


@dataclass(frozen=True, slots=True)
class WordTokens:
    """Tokens of each of WORDS after a space and at the beginning of a text; `overhead` is what a prompt has besides."""

    spaced: tuple[int, ...]
    leading: tuple[int, ...]
    overhead: int = 0

    @classmethod
    def of(cls, spaced: Sequence[int], leading: Sequence[int], counted: Sequence[tuple[str, int]]) -> WordTokens | None:
        """What explains how many tokens a server `counted` in each of some texts; None where this does not."""
        words = cls(tuple(spaced), tuple(leading))
        overheads = {tokens - words.count(text) for text, tokens in counted}
        if len(overheads) != 1 or min(*spaced, *leading) < 1:
            return None
        return cls(words.spaced, words.leading, overheads.pop())

    def count(self, text: str) -> int:
        """Tokens of a text of these words, as a prompt."""
        first, *rest = (_NUMBERS[word] for word in text.split())
        return self.overhead + self.leading[first] + sum(self.spaced[n] for n in rest)


_NUMBERS = {word: n for n, word in enumerate(WORDS)}


class ExactPrompts:
    """Stretches of a pool whose last words are chosen so that the prompt has its length."""

    def __init__(self, pool: PromptPool, words: WordTokens) -> None:
        self._pool = pool
        self._words = words
        self._sums = np.concatenate([[0], np.cumsum(np.array(words.spaced)[pool.drawn])])
        self._by_tokens: dict[int, list[str]] = {}
        for word, tokens in zip(WORDS, words.spaced, strict=True):
            self._by_tokens.setdefault(tokens, []).append(word)
        self._last_of = _last_of(sorted(self._by_tokens))

    def text(self, number: int, tokens: int) -> str:
        """The prompt of the n-th request, of so many tokens; the closest shorter one, at least a word, if none has."""
        first = self._pool.first(number)
        left = tokens - self._words.overhead - self._words.leading[self._pool.drawn[first]]
        if left < 0:
            return self._short(number, tokens - self._words.overhead)
        most = self._fitting(first, left)
        for words in range(most, 0, -1):
            rest = left - (self._sum_to(first + words) - self._sum_to(first + 1))
            if rest >= FURTHEST:
                break
            if (end := self._end(number, rest)) is not None:
                return self._pool.text(number, words) + end
        return self._pool.text(number, most)

    def _fitting(self, first: int, tokens: int) -> int:
        """How many words from there on have at most so many tokens, the first one not counted."""
        whole, rest = divmod(int(self._sums[first + 1]) + tokens, int(self._sums[-1]))
        return whole * POOL_WORDS + int(np.searchsorted(self._sums, rest, side="right")) - 1 - first

    def _sum_to(self, place: int) -> int:
        whole, rest = divmod(place, POOL_WORDS)
        return whole * int(self._sums[-1]) + int(self._sums[rest])

    def _end(self, number: int, tokens: int) -> str | None:
        """Further words of so many tokens, others for other requests; None where there are no such words."""
        end = []
        while tokens:
            last = self._last_of[tokens]
            if not last:
                return None
            choice = self._by_tokens[last]
            end.append(choice[(number + tokens) % len(choice)])
            tokens -= last
        return "".join(f" {word}" for word in end)

    def _short(self, number: int, tokens: int) -> str:
        """A prompt that is shorter than the first word of its stretch."""
        leading = self._words.leading
        starts = [n for n, count in enumerate(leading) if count <= tokens] or [leading.index(min(leading))]
        chosen = WORDS[starts[number % len(starts)]]
        return chosen + (self._end(number, max(0, tokens - leading[_NUMBERS[chosen]])) or "")


def _last_of(sizes: Sequence[int]) -> list[int]:
    """For each number of tokens up to FURTHEST, the size of one word of those that have as many; 0 where none have."""
    last = [0] * FURTHEST
    for tokens in range(1, FURTHEST):
        last[tokens] = next((size for size in sizes if size == tokens or (size < tokens and last[tokens - size])), 0)
    return last

"""Prompts of a wanted number of tokens, without the server's tokenizer at hand.

Text is made of short English words, most of which are one token with the space before them in the tokenizers of large
models. How many tokens it really has, the server tells before the run: of two short requests, and where it has
`/tokenize`, of each word (`core.bench.exact_prompts`). Every prompt is another stretch of one long random text, so that
no prefix cache finds what it has seen.

The text is drawn in turns of all words, so that any stretch has about the same mix of long words and short ones: with
words drawn freely, the two first requests have another mix than the prompts, and these came out 6 % too long where a
word has 4 ± 1.6 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

Api = Literal["completions", "chat"]
Prompt = str | list[int]
PromptFit = Literal["exact", "calibrated", "word_per_token"]

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city name president team minute idea body
information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy music market sense
"""
WORDS = tuple(_COMMON.split())
POOL_WORDS = 1 << 17
# Ids that every tokenizer of 1,256 entries or more has, without its first ones, which may be special.
LOWEST_ID, IDS = 256, 1000
CALIBRATION_WORDS = (len(WORDS), 2 * len(WORDS))


class PromptPool:
    """A long random text, the same for one seed, and the stretches of it that are prompts.

    `drawn` are the numbers of its words among WORDS.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 2])
        turns = -(-POOL_WORDS // len(WORDS))
        self.drawn = rng.permuted(np.tile(np.arange(len(WORDS)), (turns, 1)), axis=1).ravel()[:POOL_WORDS]
        lengths = np.array([len(word) + 1 for word in WORDS])
        self._text = "".join(f" {WORDS[n]}" for n in self.drawn.tolist())
        self._starts = np.concatenate([[0], np.cumsum(lengths[self.drawn])])
        self._ids = (LOWEST_ID + rng.integers(IDS, size=POOL_WORDS)).tolist()
        self._order = rng.permutation(POOL_WORDS)

    def calibration_texts(self) -> tuple[str, str]:
        """Two texts of CALIBRATION_WORDS words in which every word is as frequent as in all prompts together."""
        few, many = CALIBRATION_WORDS
        return self._stretch(0, few), self._stretch(few, many)

    def text(self, number: int, words: int) -> str:
        """The prompt of the n-th request as text of so many words."""
        return self._stretch(self.first(number), words)

    def _stretch(self, first: int, words: int) -> str:
        pieces: list[str] = []
        while words > 0:
            taken = min(words, POOL_WORDS - first)
            pieces.append(self._text[self._starts[first] : self._starts[first + taken]])
            words, first = words - taken, 0
        return "".join(pieces).removeprefix(" ")

    def ids(self, number: int, tokens: int) -> list[int]:
        """The prompt of the n-th request as so many token ids."""
        first = self.first(number)
        pieces: list[int] = []
        while tokens > 0:
            taken = min(tokens, POOL_WORDS - first)
            pieces += self._ids[first : first + taken]
            tokens, first = tokens - taken, 0
        return pieces

    def first(self, number: int) -> int:
        """Which word of the pool the prompt of the n-th request begins with."""
        return int(self._order[number % POOL_WORDS])


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens a text of so many words has: `overhead` (a chat template) and so many a word."""

    overhead: float = 0.0
    tokens_per_word: float = 1.0

    @classmethod
    def of(cls, words: tuple[int, int], tokens: tuple[int | None, int | None]) -> Calibration | None:
        """From what a server counted for two texts; None where it counted nothing, or nothing that makes sense."""
        if tokens[0] is None or tokens[1] is None or tokens[1] <= tokens[0]:
            return None
        per_word = (tokens[1] - tokens[0]) / (words[1] - words[0])
        return cls(tokens[0] - per_word * words[0], per_word)

    def words(self, tokens: int) -> int:
        """How many words come closest to so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


def request_body(
    api: Api,
    model: str,
    prompt: Prompt,
    max_tokens: int,
    *,
    ignore_eos: bool,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The body of a streaming request: greedy, with a count of tokens at the end; fields of `extra` go over it."""
    body: dict[str, Any] = {"model": model}
    if api == "chat":
        body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": max_tokens}
    else:
        body |= {"prompt": prompt, "max_tokens": max_tokens}
    body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | dict(extra or {}))

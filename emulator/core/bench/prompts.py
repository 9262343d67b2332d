"""Prompts of a wanted number of tokens, without the server's tokenizer at hand.

Text is made of short English words, most of which are one token with the space before them in the tokenizers of large
models. How many tokens it really has, two short requests to the server tell before the run (`Calibration`). Every
prompt is another stretch of one long random text, so that no prefix cache finds what it has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

Api = Literal["completions", "chat"]
Prompt = str | list[int]

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
CALIBRATION_WORDS = (32, 288)


class PromptPool:
    """A long random text, the same for one seed, and the stretches of it that are prompts."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 2])
        drawn = rng.integers(len(WORDS), size=POOL_WORDS)
        lengths = np.array([len(word) + 1 for word in WORDS])
        self._text = "".join(f" {WORDS[n]}" for n in drawn.tolist())
        self._starts = np.concatenate([[0], np.cumsum(lengths[drawn])])
        self._ids = (LOWEST_ID + rng.integers(IDS, size=POOL_WORDS)).tolist()
        self._order = rng.permutation(POOL_WORDS)

    def text(self, number: int, words: int) -> str:
        """The prompt of the n-th request as text of so many words."""
        first = self._first(number)
        pieces: list[str] = []
        while words > 0:
            taken = min(words, POOL_WORDS - first)
            pieces.append(self._text[self._starts[first] : self._starts[first + taken]])
            words, first = words - taken, 0
        return "".join(pieces).removeprefix(" ")

    def ids(self, number: int, tokens: int) -> list[int]:
        """The prompt of the n-th request as so many token ids."""
        first = self._first(number)
        pieces: list[int] = []
        while tokens > 0:
            taken = min(tokens, POOL_WORDS - first)
            pieces += self._ids[first : first + taken]
            tokens, first = tokens - taken, 0
        return pieces

    def _first(self, number: int) -> int:
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


def request_body(api: Api, model: str, prompt: Prompt, max_tokens: int, *, ignore_eos: bool) -> bytes:
    """The body of a streaming request, as `vllm bench serve` sends it: greedy, with a count of tokens at the end."""
    body: dict[str, Any] = {"model": model}
    if api == "chat":
        body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": max_tokens}
    else:
        body |= {"prompt": prompt, "max_tokens": max_tokens}
    body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body)

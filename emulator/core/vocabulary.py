"""The words that the emulated model writes, and how any text is counted in them.

The vocabulary is made here by rule, the same on every machine: the 256 bytes, syllables of a consonant and a vowel, the
same after a space, and words of two syllables after a space. It is written down for others as a byte-level BPE
(`core.tokenizer_files`); its merges never compete: a syllable is one wherever it stands, so text
is read in arrays of bytes, a megabyte in a few milliseconds.

Output begins with a syllable and goes on with words: each emitted token is exactly one token when its text, all of it,
or all of it with its ends stripped, is read again. Text in natural languages takes about three tokens a word.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)
BEGIN, END = "<|begin|>", "<|end|>"
SPECIALS = (BEGIN, END)

FIRST_BYTE = len(SPECIALS)
FIRST_SYLLABLE = FIRST_BYTE + 256
FIRST_SPACED = FIRST_SYLLABLE + len(SYLLABLES)
FIRST_WORD = FIRST_SPACED + len(SYLLABLES)
SIZE = FIRST_WORD + len(SYLLABLES) ** 2
WORDS = SIZE - FIRST_WORD
SYLLABLE_CHARS, WORD_CHARS = 2, 5
# Coprime to the number of words, so that a text goes through all of them before it repeats.
_STRIDE = 2477
_INVERSE = pow(_STRIDE, -1, WORDS)


def _tokens() -> Iterator[bytes]:
    yield from (text.encode() for text in SPECIALS)
    yield from (bytes([value]) for value in range(256))
    yield from (text.encode() for text in SYLLABLES)
    yield from (f" {text}".encode() for text in SYLLABLES)
    yield from (f" {one}{two}".encode() for one, two in itertools.product(SYLLABLES, SYLLABLES))


TOKENS: tuple[bytes, ...] = tuple(_tokens())
"""The bytes of every token, by id."""

_ROUND = "".join(TOKENS[FIRST_WORD + place * _STRIDE % WORDS].decode("ascii") for place in range(WORDS))
"""What every answer goes through after its first token, from its own place on and again and again."""

_NONE, _VOWEL, _SPACE = 255, len(CONSONANTS), 254
_KINDS = bytes((CONSONANTS + VOWELS).find(chr(value)) % 256 if value != ord(" ") else _SPACE for value in range(256))
"""What each byte may be in a word: a consonant by its place, a vowel by its place after those, a space, or nothing."""

_BLOCK_BYTES = 65_536
_MARGIN_BYTES = max(len(special) for special in SPECIALS) - 1
"""No token reaches farther from one of its bytes."""


class _Block:
    """A piece of a text, and at which of its bytes there is a syllable, a space and one, or a space and two."""

    def __init__(self, data: bytes) -> None:
        self.size = size = len(data)
        self.data = np.frombuffer(data, dtype=np.uint8)
        # Beyond the last byte nothing starts.
        self.kinds = kinds = np.frombuffer(data.translate(_KINDS) + bytes([_NONE]) * WORD_CHARS, dtype=np.uint8)
        syllable = (kinds[:-1] < _VOWEL) & (kinds[1:] >= _VOWEL) & (kinds[1:] < _SPACE)
        self.syllable = syllable[:size]
        self.spaced = (kinds[:size] == _SPACE) & syllable[1 : size + 1]
        self.word = self.spaced & syllable[3 : size + 3]
        self.specials = [_places(data, special.encode()) for special in SPECIALS]

    def starts(self) -> NDArray[np.bool_]:
        """Which bytes begin a token."""
        starts = np.ones(self.size + WORD_CHARS, dtype=np.bool_)
        starts[1 : self.size + 1] = ~(self.syllable | self.spaced)
        starts[3 : self.size + 3] &= ~self.word
        for special, places in zip(SPECIALS, self.specials, strict=True):
            for after in range(1, len(special)):
                starts[places + after] = False
        return starts[: self.size]

    def tokens(self, own: slice) -> list[int]:
        """The tokens that begin in a part of it."""
        places = np.flatnonzero(self.starts()[own]) + own.start
        first, second = self._syllables(places + 1), self._syllables(places + 3)
        ids = FIRST_BYTE + self.data[places].astype(np.int32)
        ids = np.where(self.syllable[places], FIRST_SYLLABLE + self._syllables(places), ids)
        ids = np.where(self.spaced[places], FIRST_SPACED + first, ids)
        ids = np.where(self.word[places], FIRST_WORD + first * len(SYLLABLES) + second, ids)
        for token, special in enumerate(self.specials):
            ids[np.isin(places, special)] = token
        found: list[int] = ids.tolist()
        return found

    def _syllables(self, places: NDArray[np.intp]) -> NDArray[np.int32]:
        """Which syllables stand there, where any do."""
        return self.kinds[places].astype(np.int32) * len(VOWELS) + self.kinds[places + 1] - _VOWEL


def _places(data: bytes, special: bytes) -> NDArray[np.intp]:
    """Where a special token is; none overlaps another."""
    if special not in data:
        return np.empty(0, dtype=np.intp)
    values = np.frombuffer(data, dtype=np.uint8)
    found = np.flatnonzero(values[: len(data) - len(special) + 1] == special[0])
    for after, value in enumerate(special):
        found = found[values[found + after] == value]
    return found


def _blocks(text: str) -> Iterator[tuple[_Block, slice]]:
    """A text in blocks that overlap, each with the part of it that no other one has."""
    data = _utf8(text)
    for at in range(0, len(data), _BLOCK_BYTES):
        low = max(0, at - _MARGIN_BYTES)
        yield _Block(data[low : at + _BLOCK_BYTES + _MARGIN_BYTES]), slice(at - low, at - low + _BLOCK_BYTES)


def count(text: str, most: int | None = None) -> int:
    """How many tokens a text has; where these are more than `most`, some number above it."""
    tokens = 0
    for block, own in _blocks(text):
        tokens += int(np.count_nonzero(block.starts()[own]))
        if most is not None and tokens > most:
            break
    return tokens


def encode(text: str, most: int | None = None) -> list[int]:
    """The tokens of a text; where these are more than `most`, some of them, and more than that."""
    tokens: list[int] = []
    for block, own in _blocks(text):
        tokens += block.tokens(own)
        if most is not None and len(tokens) > most:
            break
    return tokens


def decode(tokens: Iterable[int]) -> str:
    """The text of some tokens, ids from 0 to SIZE - 1; bytes that are no UTF-8 are replaced."""
    return b"".join([TOKENS[token] for token in tokens]).decode("utf-8", errors="replace")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")


# --- what the model writes ------------------------------------------------------------------------------------------


def seed_of(prompt: str | Sequence[int]) -> int:
    """What the answer to a prompt follows from: the same prompt is always answered by the same words."""
    return zlib.crc32(_utf8(prompt) if isinstance(prompt, str) else msgspec.json.encode(prompt)[1:-1])


def written(seed: int, index: int) -> int:
    """The token that an answer has at a place, counted from 0."""
    if index == 0:
        return FIRST_SYLLABLE + seed % len(SYLLABLES)
    return FIRST_WORD + (seed + index * _STRIDE) % WORDS


def written_text(seed: int, index: int) -> str:
    """Its text: ASCII letters, but for a space in front; nothing that JSON would have to escape."""
    return TOKENS[written(seed, index)].decode("ascii")


def start_of(index: int) -> int:
    """Characters of an answer before the token at a place: a syllable has 2, a word 5."""
    return 0 if index == 0 else SYLLABLE_CHARS + WORD_CHARS * (index - 1)


def written_span(seed: int, start: int, end: int) -> str:
    """The characters of an answer from one place to another, be it as long as it likes."""
    first = written_text(seed, 0)
    words_start = max(0, start - SYLLABLE_CHARS)
    begin = (_INVERSE * seed + 1) % WORDS * WORD_CHARS + words_start % len(_ROUND)
    length = max(0, end - SYLLABLE_CHARS - words_start)
    rounds = -(-(begin % len(_ROUND) + length) // len(_ROUND))
    begin %= len(_ROUND)
    return first[start:end] + (_ROUND * rounds)[begin : begin + length]


def first_written(seed: int, token: int, least: int) -> int | None:
    """The first place from `least` on at which an answer has a token; None where it never has it."""
    if least == 0 and token == written(seed, 0):
        return 0
    if not FIRST_WORD <= token < SIZE:
        return None
    place = (token - FIRST_WORD - seed) * _INVERSE % WORDS
    least = max(1, least)
    return least + (place - least) % WORDS

"""The words that the emulated model writes, and how any text is counted in them.

The vocabulary is made here by rule, the same on every machine: the 256 bytes, syllables of a consonant and a vowel, the
same after a space, and words of two syllables after a space. It is written down for others as a byte-level BPE
(`core.tokenizer_files`); its merges never compete, so one regular expression does what they do.

Output begins with a syllable and goes on with words: each emitted token is exactly one token when its text, all of it,
or all of it with its ends stripped, is read again. Text in natural languages takes about three tokens a word.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence

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
LONGEST_TOKEN_BYTES = max(len(text) for text in SPECIALS)

# Coprime to the number of words, so that a text goes through all of them before it repeats.
_STRIDE = 2477


def _tokens() -> Iterator[bytes]:
    yield from (text.encode() for text in SPECIALS)
    yield from (bytes([value]) for value in range(256))
    yield from (text.encode() for text in SYLLABLES)
    yield from (f" {text}".encode() for text in SYLLABLES)
    yield from (f" {one}{two}".encode() for one, two in itertools.product(SYLLABLES, SYLLABLES))


TOKENS: tuple[bytes, ...] = tuple(_tokens())
"""The bytes of every token, by id."""

_IDS = {text: token for token, text in enumerate(TOKENS)}
_SYLLABLE = f"[{CONSONANTS}][{VOWELS}]"
_TOKEN = re.compile(
    rf"{'|'.join(map(re.escape, SPECIALS))}| {_SYLLABLE}(?:{_SYLLABLE})?|{_SYLLABLE}|.".encode(), re.DOTALL
)


def count(text: str) -> int:
    """How many tokens a text has."""
    return len(_TOKEN.findall(_utf8(text)))


def encode(text: str) -> list[int]:
    """The tokens of a text."""
    return [_IDS[token] for token in _TOKEN.findall(_utf8(text))]


def decode(tokens: Iterable[int]) -> str:
    """The text of some tokens, bytes that are no UTF-8 replaced; raises ValueError for an id that is none."""
    found = []
    for token in tokens:
        if not 0 <= token < SIZE:
            raise ValueError(f"there is no token {token}; ids go from 0 to {SIZE - 1}")
        found.append(TOKENS[token])
    return b"".join(found).decode("utf-8", errors="replace")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")


# --- what the model writes ------------------------------------------------------------------------------------------


def seed_of(prompt: str | Sequence[int]) -> int:
    """What the answer to a prompt follows from: the same prompt is always answered by the same words."""
    return zlib.crc32(_utf8(prompt) if isinstance(prompt, str) else ",".join(map(str, prompt)).encode())


def written(seed: int, index: int) -> int:
    """The token that an answer has at a place, counted from 0."""
    if index == 0:
        return FIRST_SYLLABLE + seed % len(SYLLABLES)
    return FIRST_WORD + (seed + index * _STRIDE) % (SIZE - FIRST_WORD)


def written_text(seed: int, index: int) -> str:
    """Its text: ASCII letters, but for a space in front; nothing that JSON would have to escape."""
    return TOKENS[written(seed, index)].decode("ascii")

"""What KV a request has, byte for byte: known to every node of a run, so that a receiver can tell what is wrong.

One incompressible pattern, drawn from the run's seed, is read from a place of each request's own. Its length is prime:
no two whole blocks of a request hold the same bytes, so that a block in the wrong place shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

PATTERN_BYTES = 16_777_213
"""The largest prime below 16 MiB."""

Bytes8 = npt.NDArray[np.uint8]


class KvContent:
    """The KV of every request of the run with this seed: byte i of one is `pattern[(start(request) + i) % length]`."""

    def __init__(self, seed: int) -> None:
        # raw draws of the bit generator: the same with every version of NumPy
        words = np.random.default_rng(seed).bit_generator.random_raw(-(-PATTERN_BYTES // 8))
        pattern: Bytes8 = np.asarray(words, dtype="<u8").view(np.uint8)[:PATTERN_BYTES]
        pattern.flags.writeable = False
        self.pattern = pattern

    def start(self, request_id: str) -> int:
        """Where in the pattern the KV of a request begins."""
        digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % PATTERN_BYTES

    def views(self, request_id: str, offset: int, nbytes: int) -> Iterator[Bytes8]:
        """Bytes `offset` … `offset + nbytes` of a request's KV as consecutive views of the pattern."""
        at = (self.start(request_id) + offset) % PATTERN_BYTES
        while nbytes > 0:
            view = self.pattern[at : at + nbytes]
            yield view
            nbytes -= len(view)
            at = 0

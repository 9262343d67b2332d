"""KV content: the same for every node of a run, another for every request and every place in it."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from emulator.core.kv_content import PATTERN_BYTES, KvContent

CONTENT = KvContent(7)


def whole(content: KvContent, request_id: str, offset: int, nbytes: int) -> bytes:
    return b"".join(view.tobytes() for view in content.views(request_id, offset, nbytes))


def test_every_node_of_a_run_knows_the_same_content_and_another_run_has_another() -> None:
    assert whole(KvContent(7), "r0", 5, 4_000) == whole(CONTENT, "r0", 5, 4_000)
    assert whole(KvContent(8), "r0", 5, 4_000) != whole(CONTENT, "r0", 5, 4_000)


def test_the_pattern_of_a_seed_never_changes() -> None:
    """Nodes on other machines may have other versions of everything."""
    assert zlib.crc32(KvContent(0).pattern.data) == PINNED


PINNED = 0xF1E16D64


@pytest.mark.parametrize("length", [1, 4_096, PATTERN_BYTES - 1, PATTERN_BYTES, 2 * PATTERN_BYTES + 3])
def test_parts_make_up_the_whole_across_the_end_of_the_pattern(length: int) -> None:
    end = PATTERN_BYTES - CONTENT.start("r1")
    first = max(0, end - length // 2)
    cuts = sorted({first, first + length // 3, end, first + length})
    parts = [whole(CONTENT, "r1", start, stop - start) for start, stop in itertools.pairwise(cuts) if stop > start]
    assert b"".join(parts) == whole(CONTENT, "r1", first, cuts[-1] - first)


def test_views_are_of_the_pattern_itself_and_cannot_be_written() -> None:
    views = list(CONTENT.views("r2", 0, 3 * PATTERN_BYTES))
    assert all(np.shares_memory(view, CONTENT.pattern) and not view.flags.writeable for view in views)
    assert sum(map(len, views)) == 3 * PATTERN_BYTES


@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 20, 5_242_880])
def test_no_two_blocks_of_a_request_or_of_two_requests_are_alike(block_bytes: int) -> None:
    sampled = 64
    blocks = [whole(CONTENT, request, n * block_bytes, sampled) for request in ("r3", "r4") for n in range(500)]
    assert len(set(blocks)) == len(blocks)


def test_the_content_cannot_be_compressed() -> None:
    sample = whole(CONTENT, "r5", 0, 1 << 20)
    assert len(zlib.compress(sample)) >= len(sample)

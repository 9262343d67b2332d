"""Touching memory before a run needs it.

The first use of a page costs a fault and its zeroing, and on a virtual machine the host has to find it too: filling
fresh memory was measured at 0.4 to 7 GB/s, below what a 10 Gbps link brings. A node that will hold KV therefore takes
the memory once and gives it back to its own heap, from which the frames of the run then come.
"""

from __future__ import annotations

import ctypes
import sys

_BLOCK_BYTES = 16 << 20  # below the mmap threshold of the allocator's settings, so that it stays in the heap


def warm_heap(nbytes: int) -> int:
    """Make the heap hold `nbytes` bytes of touched memory; returns how many it got. Does nothing outside Linux."""
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    blocks: list[int] = []
    for _ in range(-(-nbytes // _BLOCK_BYTES)):
        block = libc.malloc(_BLOCK_BYTES)
        if block is None:
            break
        libc.memset(block, 1, _BLOCK_BYTES)
        blocks.append(block)
    for block in blocks:
        libc.free(block)
    return len(blocks) * _BLOCK_BYTES

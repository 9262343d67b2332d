"""The allocator settings that every process carrying KV bytes starts with.

ZeroMQ allocates a buffer for each received frame. By default glibc maps and unmaps each of these, so that every
frame pays for fresh zeroed pages. These settings keep freed frames in the heap for the next one. glibc reads
them once, at process start, so the launcher puts them into the environment of its children; other C libraries
ignore them. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NODE_ALLOCATOR_ENV: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }
)
"""Environment variables for a node's process, as text; merge them before it starts."""

"""The settings that every process carrying KV bytes starts with: those of its allocator, and one thread for its BLAS.

ZeroMQ allocates a buffer for each received frame. By default glibc maps and unmaps each of these, so that every
frame pays for fresh zeroed pages: measured, a stream of 1 MiB frames costs a third more CPU time. With these
settings freed frames stay in the heap for the next ones, and the heap grows by huge pages where the system
offers them, which makes the first use of memory three to five times faster. glibc reads them once, at process
start, so the launcher puts them into the environment of its children; other C libraries ignore them. A node that
computes with NumPy is one core, as planned work and other nodes need it to be. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NODE_ALLOCATOR_ENV: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that every glibc accepts
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),  # never: what was warmed must stay
        "MALLOC_ARENA_MAX": "1",  # one heap for all threads, so that one thread can warm what another will use
        "MALLOC_TOP_PAD_": str(64 << 20),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "VECLIB_MAXIMUM_THREADS": "1",  # of macOS
    }
)
"""Environment variables for a node's process, as text; merge them before it starts."""

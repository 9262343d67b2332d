"""What a computing device is made of: NumPy on this machine's cores, or CuPy on a GPU, behind one interface.

Work is enqueued and runs in order on the device's stream; only `wait` waits. Everything but speed is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from emulator.core.calibration import Direction, Operands
from emulator.core.effects import KvWrite
from emulator.core.step_work import UnitTimes


class Backend(Protocol):
    """Work on one device. All methods are for one thread, the device's, unless they say otherwise.

    `device_id` is the same for all processes that use the same piece of hardware; `description` names that, its drivers
    in parentheses. `gemm_ks` are the K of its GEMM units, of which `mn` is M and N; `read_bytes_at_hand` is how much
    memory a read runs over before it begins anew.
    """

    name: str
    device_id: str
    description: str
    mn: int
    gemm_ks: tuple[int, ...]
    read_bytes_at_hand: int

    def warm_up(self, units: UnitTimes | None = None) -> None:
        """Load what the first use of each kind of work loads, once, before anything is timed or any step is run.

        Without `units` this times some work, to leave units out that take too long; so nobody else may measure then.
        """

    def gemm(self, k: int, times: int) -> None:
        """Enqueue `times` products of (mn × k) by (k × mn)."""

    def fill(self, iterations: int) -> None:
        """Enqueue the small arithmetic kernel."""

    def read(self, nbytes: int) -> None:
        """Enqueue a streaming read of `nbytes` of device memory, where the last one ended."""

    def mark(self) -> Any:
        """An event after everything enqueued so far."""

    def wait(self, mark: Any) -> None:
        """Sleep until the event; raises RunError when the device failed."""

    def time_s(self, enqueue: Callable[[], None], repeats: int = 1) -> list[float]:
        """Seconds on the device of each of `repeats` calls of `enqueue`, by the device's own clock where it has one."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class MeasuredBackend(Backend, Protocol):
    """A backend that `pdemu calibrate` can measure: what it needs beside what steps are made of.

    `driver` names what drives the device, with versions. All is enqueued on the device's stream, as other work is.
    """

    driver: str

    def product(self, k: int, times: int, *, rows: int, operands: Operands) -> None:
        """Enqueue `times` products of (rows × k) by (k × mn), `rows` up to mn; what `gemm` does is (mn, low-toggle)."""

    def copy(self, nbytes: int, direction: Direction) -> None:
        """Enqueue copies of `nbytes` in all, `out` to pinned host memory, back `in`, or `within` device memory.

        They go over buffers of their own, as large as the KV store's pinned ones at least, and begin anew at the end.
        """


class KvStore(Protocol):
    """KV blocks in a device's memory, numbered from 0, `block_bytes` wire bytes each.

    A request's KV is one sequence of bytes over its blocks in their order. What a step computes of it is known
    (`core.kv_content`), so that the receiver can tell whether what arrived is right.
    """

    block_bytes: int

    def write(self, write: KvWrite, start: int, stop: int) -> None:
        """Compute bytes `start` … `stop` of a request's KV (wire bytes) into its blocks: part of a step, in order."""

    def gather(self, blocks: Sequence[int], offset: int, nbytes: int) -> memoryview:
        """Bytes of a request's KV in host memory, good until the next call; for the sender's thread alone."""

    def scatter(self, blocks: Sequence[int], offset: int, frames: Sequence[Any]) -> None:
        """Put what was received (buffers) into a request's blocks from `offset` on; for the receiver's thread alone."""

    def is_right(self, request_id: str, blocks: Sequence[int], nbytes: int) -> bool:
        """Whether the first `nbytes` in these blocks are those that steps compute for a request; receiver's thread."""

    def close(self) -> None:
        """Free everything. Idempotent."""

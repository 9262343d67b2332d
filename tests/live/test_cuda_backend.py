"""What steps do on a GPU, on one made of this machine's memory."""

from __future__ import annotations

import ctypes
import threading

import pytest

from emulator.core.byte_runs import Run
from emulator.core.errors import CapacityError, RunError
from emulator.core.step_work import UnitTimes
from emulator.live.cuda import CudaBackend
from emulator.live.cuda_backend import GEMM_KS, MN, UNIT_S, read_buffer_bytes
from emulator.live.cuda_gpu import run_blocks
from tests.live.host_cupy import ABOUT, GEMM_FLOPS, READ_BYTES_PER_S, TOTAL_BYTES, HostCupy, Launcher, open_host

MIB = 1 << 20
READ_BYTES = 40 * MIB


def test_opening_finds_the_units_that_take_200_us_at_most(host: HostCupy) -> None:
    backend = open_host(host)
    takes_s = {k: 2 * MN * MN * k / GEMM_FLOPS for k in GEMM_KS}
    assert backend.gemm_ks == tuple(k for k in GEMM_KS if takes_s[k] <= UNIT_S) == (512, 1024)
    assert backend.read_bytes_at_hand == READ_BYTES
    assert backend.description == "Host GPU (driver 1.0)"


def test_calibrated_units_are_taken_as_they_are(kernels: dict[str, Launcher]) -> None:
    host = HostCupy(kernels, TOTAL_BYTES)
    backend = CudaBackend(host, 0, ABOUT, None)
    assert not host.gemms, "what loads and times is left to warming up"
    rate = READ_BYTES_PER_S / 2
    units = UnitTimes(gemm_s=((4096, 1e-3),), fill_s=1e-6, fill_launch_s=0.0, read_bytes_per_s=rate, read_launch_s=0.0)
    backend.warm_up(units)
    assert backend.gemm_ks == GEMM_KS
    host.launched.clear()
    backend.read(READ_BYTES)
    assert len(host.launched) == -(-READ_BYTES // int(UNIT_S * rate)) == 2, "launches are as long as the rate says"


def test_nodes_that_share_a_gpu_divide_what_is_free(kernels: dict[str, Launcher]) -> None:
    backend = CudaBackend(HostCupy(kernels, 2 * TOTAL_BYTES), 0, ABOUT, None, sharers=2)
    assert backend.read_bytes_at_hand == READ_BYTES == TOTAL_BYTES // 4
    granted = CudaBackend(HostCupy(kernels, 2 * TOTAL_BYTES), 0, ABOUT, TOTAL_BYTES, sharers=2)
    assert granted.read_bytes_at_hand == READ_BYTES, "what is granted is for each node"


def test_gemms_are_of_two_dimensions_and_whole(host: HostCupy) -> None:
    backend = open_host(host)
    backend.gemm(1024, 3)
    backend.product(512, 2, rows=16, operands="random")
    assert host.gemms == [((MN, 1024), (1024, MN))] * 3 + [((16, 512), (512, MN))] * 2


def test_time_is_that_of_the_gpu(host: HostCupy) -> None:
    backend = open_host(host)
    taken = backend.time_s(lambda: backend.gemm(512, 2), repeats=3)
    assert taken == pytest.approx([4 * MN * MN * 512 / GEMM_FLOPS] * 3)


def test_reads_go_on_where_the_last_one_ended_in_launches_of_200_us_at_most(host: HostCupy) -> None:
    backend = open_host(host)
    backend.read(10 * MIB)
    backend.read(READ_BYTES + 5)
    assert sum(nbytes for name, nbytes in host.launched) == 10 * MIB + READ_BYTES
    assert all(name == "read_memory" for name, _ in host.launched)
    longest = max(nbytes for _, nbytes in host.launched)
    assert longest <= UNIT_S * READ_BYTES_PER_S * 1.01
    assert len(host.launched) <= 3 + (10 * MIB + READ_BYTES) / longest


def test_nothing_is_enqueued_for_nothing(host: HostCupy) -> None:
    backend = open_host(host)
    backend.fill(0)
    backend.read(0)
    backend.gemm(512, 0)
    assert not host.launched
    assert not host.gemms


@pytest.mark.parametrize("direction", ["out", "in", "within"])
def test_measured_copies_are_as_long_as_asked_and_leave_zeros_to_read(host: HostCupy, direction: str) -> None:
    backend = open_host(host)
    backend.copy(50 * MIB, direction)
    assert sum(nbytes for name, nbytes in host.launched if name == "copy") == 50 * MIB
    host.launched.clear()
    never = host_words(backend)
    backend.read(READ_BYTES)
    assert host_words(backend) == never


def host_words(backend: CudaBackend) -> bytes:
    """What the kernels have stored that are to store nothing."""
    return ctypes.string_at(backend._buffers["never"].ptr, 16)


def test_a_gpu_that_fails_is_told_in_one_line(host: HostCupy) -> None:
    backend = open_host(host)
    host.failing = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    with pytest.raises(RunError, match=r"^Host GPU \(driver 1.0\): work: cudaErrorIllegalAddress: an illegal"):
        backend.wait(backend.mark())
    backend.close()
    backend.close()


def test_steps_may_be_run_by_another_thread_than_the_one_that_opened(host: HostCupy) -> None:
    backend = open_host(host)
    failures: list[BaseException] = []

    def steps() -> None:
        try:
            backend.gemm(512, 1)
            backend.fill(3)
            backend.read(MIB)
            backend.wait(backend.mark())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert not failures


def test_too_little_memory_is_told_before_anything_runs(kernels: dict[str, Launcher]) -> None:
    with pytest.raises(
        CapacityError, match=r"a cache of 1\.049MB would hold much of what is read; grant the node at least"
    ):
        CudaBackend(HostCupy(kernels, TOTAL_BYTES), 0, ABOUT, 8 * MIB)


def test_memory_that_was_freed_can_be_had_again(host: HostCupy) -> None:
    backend = open_host(host)
    left_bytes = backend.gpu.left_bytes()
    held = backend.gpu.memory(32 * MIB, "something")
    assert backend.gpu.left_bytes() == left_bytes - 32 * MIB
    del held
    assert host.cached_bytes > 0, "the pool keeps it"
    assert backend.gpu.left_bytes() == left_bytes
    assert backend.gpu.memory(left_bytes - MIB, "something else").ptr
    with pytest.raises(CapacityError, match=r"^something: .* are wanted, but .* are taken, and .* are free"):
        backend.gpu.memory(left_bytes + 512, "something")


@pytest.mark.parametrize(
    ("limit", "expected"), [(80 << 30, 4 << 30), (8 << 30, 2 << 30), (1 << 30, 256 << 20), (801 << 20, 200 << 20)]
)
def test_reads_run_over_4_gib_or_a_quarter_of_what_there_is(limit: int, expected: int) -> None:
    assert read_buffer_bytes(limit, 50 << 20) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"), [([1], 1), ([MIB], 16), ([1 << 30], 528), ([2 * MIB] * 32, 16), ([100] * 128, 1)]
)
def test_launches_have_blocks_for_the_longest_run_and_not_too_many(lengths: list[int], expected: int) -> None:
    assert run_blocks([Run(0, 0, length) for length in lengths], 132) == expected


@pytest.mark.gpu
def test_a_gpus_work_takes_time_and_stores_nothing(gpu: CudaBackend) -> None:
    for work in (
        lambda: gpu.gemm(512, 2),
        lambda: gpu.fill(1000),
        lambda: gpu.read(256 * MIB),
        lambda: gpu.product(512, 1, rows=256, operands="random"),
        lambda: gpu.copy(8 * MIB, "out"),
        lambda: gpu.copy(8 * MIB, "in"),
        lambda: gpu.copy(8 * MIB, "within"),
    ):
        assert all(0 < took_s < 1 for took_s in gpu.time_s(work, repeats=3))
    gpu.wait(gpu.mark())
    never = gpu.gpu.pinned(16, "results")
    gpu.gpu.transfer([Run(gpu._buffers["never"].ptr, never.ctypes.data, 16)], gpu.gpu.compute)
    gpu.gpu.finish(gpu.gpu.compute)
    assert not never.any()

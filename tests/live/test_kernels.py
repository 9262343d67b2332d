"""The CUDA kernels: compiled for every architecture by NVRTC, and run thread by thread on this machine."""

from __future__ import annotations

import ctypes
import mmap
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from emulator.core.errors import RunError
from emulator.live.cuda_gpu import KERNELS, MAX_RUNS, PIECE_BYTES, RUNS, THREADS, compiled, compiled_for
from tests.live import host_cupy
from tests.live.host_cupy import Launcher

SOURCE = (host_cupy.KERNELS / "kernels.cu").read_text(encoding="utf-8")
ARCHITECTURES = (80, 89, 90, 100)


# --- on a GPU's compiler ----------------------------------------------------------------------------------------------


def _nvrtc() -> Any:
    import cupy

    return cupy.cuda.nvrtc


def _kernel(ptx: str, name: str) -> str:
    """The PTX of one kernel."""
    found = re.search(rf"\.entry {name}\(.*?\n\}}", ptx, re.DOTALL)
    assert found is not None
    return found[0]


@pytest.mark.nvrtc
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_the_kernels_compile_to_machine_code(capability: int) -> None:
    code = compiled(_nvrtc(), capability)
    assert code.startswith(b"\x7fELF")
    for name in KERNELS:
        assert f".text.{name}\0".encode() in code


@pytest.mark.nvrtc
def test_a_gpu_newer_than_the_compiler_gets_code_that_its_driver_translates() -> None:
    ptx = compiled(_nvrtc(), 999).decode()
    newest = max(_nvrtc().getSupportedArchs())
    assert f".target sm_{newest}" in ptx


@pytest.mark.nvrtc
def test_what_does_not_compile_is_refused_with_the_compilers_words() -> None:
    with pytest.raises(RunError, match=r"do not compile for sm_90: kernels\.cu\(\d+\): error: .*\n *nonsense"):
        compiled_for(_nvrtc(), "sm_90", f"{SOURCE}\nnonsense")


@pytest.mark.nvrtc
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_kernels_do_the_work_that_they_are_for(capability: int) -> None:
    """Reads and copies of 16 bytes at a time, and arithmetic that no optimisation takes away; nothing is spilled."""
    ptx = compiled_for(_nvrtc(), f"compute_{capability}", SOURCE).decode()
    assert ".local" not in ptx
    assert len(re.findall(r"ld\.global\.nc\.v4\.u32", _kernel(ptx, "read_memory"))) == 5
    for name, store in (("copy_runs", True), ("compare_runs", False)):
        kernel = _kernel(ptx, name)
        assert re.search(r"ld(\.global)?(\.nc)?\.v4\.u32", kernel)
        assert bool(re.search(r"st(\.global)?\.v4\.u32", kernel)) is store
    loop = re.search(r"\n(\S+):[^:]*?bra\s+\1;", _kernel(ptx, "arithmetic"))
    assert loop is not None
    assert loop[0].count("fma.rn") == 64


def test_kernels_and_their_launches_agree_on_sizes() -> None:
    constants = {name: int(value) for name, value in re.findall(r"^#define (\w+) (\d+)", SOURCE, re.MULTILINE)}
    assert constants == {"THREADS": THREADS, "PIECE": PIECE_BYTES, "MAX_RUNS": MAX_RUNS}
    assert RUNS.itemsize == MAX_RUNS * 3 * 8
    assert RUNS.itemsize + 8 <= 4096, "what a launch takes by value"


# --- on this machine --------------------------------------------------------------------------------------------------


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes from a multiple of 16 on."""
    memory = np.zeros(nbytes + 16, np.uint8)
    return memory[-memory.ctypes.data % 16 :][:nbytes]


def _table(runs: list[tuple[int, int, int]]) -> npt.NDArray[Any]:
    table = np.zeros((), RUNS)
    table["run"][: len(runs)] = runs
    return table


@pytest.mark.parametrize("shift", range(17))
@pytest.mark.parametrize("nbytes", [0, 1, 3, 15, 16, 17, 31, 32, 33, 1000, 40_000])
def test_copies_put_every_byte_where_it_belongs_and_no_other(
    kernels: dict[str, Launcher], shift: int, nbytes: int
) -> None:
    draw = np.random.default_rng(nbytes * 17 + shift)
    source = _aligned(nbytes + 64)
    source[:] = draw.integers(0, 256, len(source))
    for place in (0, 1, 7, 8, 15):
        target = _aligned(nbytes + 64)
        target[:] = draw.integers(0, 256, len(target))
        expected = target.copy()
        expected[place : place + nbytes] = source[shift : shift + nbytes]
        run = (source.ctypes.data + shift, target.ctypes.data + place, nbytes)
        kernels["copy_runs"]((3, 1), (32,), (_table([run]),))
        assert np.array_equal(target, expected)


def test_copies_read_nothing_beyond_the_pieces_that_they_copy(kernels: dict[str, Launcher]) -> None:
    """The source ends with its page: behind it nothing is mapped, and reading on would end this process."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    memory = np.frombuffer(pages, np.uint8)
    _protect(memory.ctypes.data + mmap.PAGESIZE, mmap.PAGESIZE)
    for nbytes in range(1, 70):
        source = memory[mmap.PAGESIZE - nbytes : mmap.PAGESIZE]
        source[:] = np.arange(nbytes)
        for place in range(16):
            target = _aligned(nbytes + place)[place:]
            kernels["copy_runs"]((1, 1), (32,), (_table([(source.ctypes.data, target.ctypes.data, nbytes)]),))
            assert np.array_equal(target, source)


def _protect(address: int, nbytes: int) -> None:
    """Take all access to whole pages away."""
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0) == 0


def test_a_launch_copies_many_runs(kernels: dict[str, Launcher]) -> None:
    draw = np.random.default_rng(5)
    source, target = _aligned(1 << 16), _aligned(1 << 16)
    source[:] = draw.integers(0, 256, len(source))
    expected, runs, at = target.copy(), [], 0
    for _ in range(MAX_RUNS):
        nbytes, start = int(draw.integers(1, 400)), int(draw.integers(0, 60_000))
        expected[at : at + nbytes] = source[start : start + nbytes]
        runs.append((source.ctypes.data + start, target.ctypes.data + at, nbytes))
        at += nbytes + int(draw.integers(0, 5))
    kernels["copy_runs"]((2, len(runs)), (16,), (_table(runs),))
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("shift", [0, 1, 4, 13])
def test_comparisons_count_what_differs(kernels: dict[str, Launcher], shift: int) -> None:
    nbytes = 1003
    right, stored = _aligned(2000), _aligned(2000)
    right[:] = np.random.default_rng(1).integers(0, 256, 2000)
    stored[5 : 5 + nbytes] = right[shift : shift + nbytes]
    run = _table([(right.ctypes.data + shift, stored.ctypes.data + 5, nbytes)])

    def different() -> int:
        count = np.zeros(1, np.uint64)
        kernels["compare_runs"]((2, 1), (32,), (run, np.uint64(count.ctypes.data)))
        return int(count[0])

    assert different() == 0
    for wrong, expected in ((5, 1), (5 + nbytes - 1, 1), (500, 1), (4, 0), (5 + nbytes, 0)):
        stored[wrong] ^= 1
        assert different() == expected
        stored[wrong] ^= 1


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 32), (3, 32), (8, 512)])
@pytest.mark.parametrize("pieces", [0, 1, 4, 31, 32, 1000, 12_345])
def test_a_read_reads_everything_once(kernels: dict[str, Launcher], pieces: int, blocks: int, threads: int) -> None:
    memory = _aligned((pieces + 2) * PIECE_BYTES).view(np.uint32)
    memory[:] = np.random.default_rng(pieces).integers(0, 1 << 32, len(memory), np.uint32)
    inside = memory[4:-4]
    total = np.zeros(1, np.uint32)
    arguments = (np.uint64(inside.ctypes.data), np.uint64(pieces), np.uint64(total.ctypes.data))
    kernels["read_memory"]((blocks,), (threads,), arguments)
    assert total[0] == np.add.reduce(inside, dtype=np.uint32)


def test_a_read_of_zeros_stores_nothing(kernels: dict[str, Launcher]) -> None:
    memory, stored = _aligned(1 << 12), np.full(1, 7, np.uint32)
    kernels["read_memory"]((2,), (32,), (np.uint64(memory.ctypes.data), np.uint64(256), np.uint64(stored.ctypes.data)))
    assert stored[0] == 7


def test_the_arithmetic_kernel_does_all_its_iterations_and_stores_nothing(kernels: dict[str, Launcher]) -> None:
    def run(iterations: int, a: float, b: float) -> float:
        stored = np.zeros(1, np.float32)
        arguments = (np.uint64(iterations), np.float32(a), np.float32(b), np.uint64(stored.ctypes.data))
        kernels["arithmetic"]((1,), (1,), arguments)
        return float(stored[0])

    assert run(100, 0.5, 0.5) == 0.0, "as it is used, its result is not negative"
    chains, starts = 4, 0 + 1 + 2 + 3
    assert run(10, 1.0, -1.0) == starts - chains * 16 * 10

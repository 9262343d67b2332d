"""Opening a GPU: what is told where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulator.core.errors import ConfigError
from emulator.live import cuda
from emulator.live.cuda import gpu_id, open_cuda, visible_gpus
from tests.live import host_cupy
from tests.live.host_cupy import HostCupy


def test_without_cupy_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"^device cuda: CuPy .*") as told:
        open_cuda(0, None)
    assert "pip install 'pd-emulator[cuda12]'" in str(told.value)
    assert str(told.value).endswith("or use --device virtual")
    assert "\n" not in str(told.value)


def test_without_a_home_cupy_compiles_into_a_passing_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("CUPY_CACHE_DIR", "")  # put back afterwards
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="CuPy"):
        open_cuda(0, None)
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_dir()


@pytest.mark.parametrize("told", [None, "FASTEST_FIRST"])
def test_gpus_are_numbered_as_nvidia_smi_does_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, told: str | None
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", told or "")
    if told is None:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError):
        open_cuda(0, None)
    assert os.environ["CUDA_DEVICE_ORDER"] == (told or "PCI_BUS_ID")


@pytest.mark.nvrtc
def test_without_a_driver_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    if cupy.cuda.is_available():
        monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", _no_driver(cupy))
        monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: 0)
    with pytest.raises(ConfigError) as told:
        open_cuda(0, None)
    assert str(told.value) == "device cuda: there is no NVIDIA driver here; install it, or use --device virtual"


def _no_driver(cupy: Any) -> Any:
    def count() -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(35)

    return count


@pytest.mark.nvrtc
def test_an_old_driver_is_told_with_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", _no_driver(cupy))
    monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: 11040)
    with pytest.raises(
        ConfigError, match=r"the NVIDIA driver is for CUDA 11\.4, and CuPy is for CUDA 1\d\.\d+; update"
    ):
        open_cuda(0, None)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("count", "seen"), [(0, "none is"), (1, "GPU 0 alone is"), (4, "GPUs 0 to 3 are")])
def test_a_gpu_that_is_not_there_is_told_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, count: int, seen: str
) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: count)
    with pytest.raises(ConfigError, match=f"there is no GPU 5: {seen} visible here"):
        open_cuda(5, None)


@pytest.mark.nvrtc
def test_the_gpus_that_are_visible_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 3)
    assert visible_gpus() == 3
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(
        ConfigError, match="finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device virtual"
    ):
        visible_gpus()


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("library", "told"),
    [
        ("NVRTC", r"libnvrtc\.so is missing; pip install 'pd-emulator\[cuda12\]'"),
        ("cuBLAS", r"libcublas\.so is missing; pip install 'pd-emulator\[cuda12\]'"),
        ("", r"GPU 1 has compute capability 6\.1, and [78]\.\d is needed"),
    ],
)
def test_what_else_a_gpu_needs_is_told(monkeypatch: pytest.MonkeyPatch, library: str, told: str) -> None:
    import cupy

    def missing(name: str) -> Any:
        def load() -> Any:
            raise ImportError(f"\n===\n{name} is missing\n===\nand more")

        return load

    class _Cuda:
        """CuPy's module, but for what is missing."""

        def __getattr__(self, name: str) -> Any:
            if name == "cublas":
                return missing("libcublas.so")() if library == "cuBLAS" else object()
            if name == "nvrtc" and library == "NVRTC":
                return SimpleNamespace(getVersion=missing("libnvrtc.so"))
            if name == "Device":
                return lambda gpu: SimpleNamespace(compute_capability="61")
            return getattr(real, name)

    real = cupy.cuda
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 2)
    monkeypatch.setattr(cupy, "cuda", _Cuda())
    with pytest.raises(ConfigError, match=told):
        open_cuda(1, None)


@pytest.mark.nvrtc
def test_cupy_is_found_a_folder_where_the_user_has_no_home() -> None:
    code = """
import os, pathlib
from emulator.live.cuda import open_cuda
from emulator.core.errors import ConfigError
try:
    open_cuda(10**6, None)
except ConfigError as error:
    print(error)
print(pathlib.Path(os.environ["CUPY_CACHE_DIR"]).is_dir())
"""
    environment = {"HOME": "/nowhere", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(host_cupy.KERNELS.parent.parent)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines()[0].startswith("device cuda: there is no ")
    assert ran.stdout.splitlines()[1] == "True"


@pytest.mark.nvrtc
def test_the_stand_in_has_what_cupy_has(host: HostCupy) -> None:
    import cupy

    for name in vars(host.cuda):
        assert hasattr(cupy.cuda, name), name
    for name in vars(host.runtime):
        assert hasattr(cupy.cuda.runtime, name), name
    for name in vars(host.cuda.nvrtc):
        assert hasattr(cupy.cuda.nvrtc, name), name
    for name in vars(host.cuda.MemoryPool()):
        assert hasattr(cupy.cuda.MemoryPool, name), name
    assert cupy.cuda.memory.OutOfMemoryError.__bases__ == (MemoryError,)
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
    assert "memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)" in (
        cupy.cuda.runtime.memcpyAsync.__doc__
    )
    assert "memsetAsync(intptr_t ptr, int value, size_t size, intptr_t stream)" in cupy.cuda.runtime.memsetAsync.__doc__
    assert "block=False, disable_timing=False" in cupy.cuda.Event.__init__.__doc__
    assert "dot(self, _ndarray_base b, _ndarray_base out=None)" in cupy.ndarray.dot.__doc__
    assert "copy_from_host(self, mem, size_t size)" in cupy.cuda.MemoryPointer.copy_from_host.__doc__


def test_a_gpus_id_is_that_of_its_uuid_and_place() -> None:
    uuid = bytes(range(1, 17))
    assert gpu_id(uuid + b"junk", "0000:1A:00.0") == f"gpu:{uuid.hex()}:0000:1a:00.0"
    assert gpu_id(uuid[:3], "0000:1A:00.0") != gpu_id(uuid[:3], "0000:1B:00.0")


def test_the_module_that_opens_gpus_imports_no_cupy_by_itself() -> None:
    assert not hasattr(cuda, "cupy")

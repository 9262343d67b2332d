"""A GPU made of this machine's memory, for tests of the CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator.live.cuda import CudaBackend
from tests.live import host_cupy
from tests.live.backends import opened
from tests.live.host_cupy import HostCupy, Launcher, host_kernels
from tests.live.lab import skip_unless


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launcher]:
    """The CUDA kernels as functions of this machine."""
    skip_unless(host_cupy.COMPILER is not None, "a C++ compiler (c++, g++ or clang++)")
    return host_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaBackend]:
    """The GPU, warm: opening it takes seconds. For tests marked gpu."""
    with opened("cuda") as backend:
        assert isinstance(backend, CudaBackend)
        yield backend


@pytest.fixture
def host(kernels: dict[str, Launcher]) -> HostCupy:
    """CuPy with one GPU of 160 MiB."""
    return HostCupy(kernels, host_cupy.TOTAL_BYTES)

"""A GPU made of this machine's memory, for tests of the CUDA device."""

from __future__ import annotations

import pytest

from tests.live import host_cupy
from tests.live.host_cupy import HostCupy, Launcher, host_kernels
from tests.live.lab import skip_unless


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launcher]:
    """The CUDA kernels as functions of this machine."""
    skip_unless(host_cupy.COMPILER is not None, "a C++ compiler (c++, g++ or clang++)")
    return host_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def host(kernels: dict[str, Launcher]) -> HostCupy:
    """CuPy with one GPU of 160 MiB."""
    return HostCupy(kernels, host_cupy.TOTAL_BYTES)

"""Which GPU of the catalog a driver's name means, and how much of its datasheet a calibration reaches."""

from __future__ import annotations

import pytest

from emulator.core.datasheet import find_gpu, shares
from emulator.lab.catalog_files import load_catalog
from tests.lab.test_calibrate import measured

GPUS = load_catalog().gpus


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),  # slower than the SXM form, of which the datasheet is
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("GPU 0, NVIDIA H200, compute capability 9.0", "h200"),
        ("CPU of this host (NumPy)", None),
    ],
)
def test_a_name_means_the_gpu_whose_datasheet_is_its_own(device: str, expected: str | None) -> None:
    found = find_gpu(device, GPUS)
    assert (found.name if found else None) == expected


def test_shares_are_of_the_datasheet_and_beside_the_catalogs_efficiencies() -> None:
    (h100,) = (gpu for gpu in GPUS if gpu.name == "h100")
    gemm, read = shares(measured()[0], h100)
    assert gemm.share == pytest.approx(400 / h100.bf16_dense_tflops, rel=1e-3)
    assert gemm.catalog == h100.mfu_linear
    assert read.share == pytest.approx(3000 / h100.memory_gb_per_s, rel=1e-3)
    assert read.catalog == h100.mbu

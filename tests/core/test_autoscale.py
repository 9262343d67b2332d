"""The scale that leaves half the machine idle: the smallest whole one that does."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.autoscale import peak_payload_bps, scale_time_for
from emulator.core.deploy import RunSpec
from emulator.core.specs import Scale
from tests.builders import load_plan, node_spec, run_spec


def _run(prefills: int, decodes: int, payload_bps: float, scale_bytes: float = 1.0) -> RunSpec:
    nodes = [node_spec(f"prefill-{i}", role="prefill") for i in range(prefills)]
    nodes += [node_spec(f"decode-{i}", role="decode") for i in range(decodes)]
    scale = Scale(bytes=scale_bytes)
    return run_spec(nodes, load_plan(), payload_bytes_per_s=payload_bps / 8, scale=scale)


@pytest.mark.parametrize(
    ("prefills", "decodes", "payload_bps", "capacity_bps", "scale"),
    [
        (1, 1, 10e9, 40e9, 1),
        (1, 1, 20e9, 40e9, 1),
        (1, 1, 20.1e9, 40e9, 2),
        (1, 1, 100e9, 40e9, 5),
        (2, 2, 100e9, 40e9, 10),
        (3, 1, 100e9, 40e9, 5),
    ],
)
def test_the_smallest_scale_that_needs_half_of_the_capacity(
    prefills: int, decodes: int, payload_bps: float, capacity_bps: float, scale: int
) -> None:
    assert scale_time_for(_run(prefills, decodes, payload_bps), capacity_bps) == scale


def test_scaled_bytes_need_less() -> None:
    assert peak_payload_bps(_run(1, 1, 2e12, scale_bytes=1000)) == pytest.approx(2e9)
    assert scale_time_for(_run(1, 1, 2e12, scale_bytes=1000), 40e9) == 1


def test_without_kv_links_nothing_is_stretched() -> None:
    run = run_spec([node_spec()], load_plan())
    assert scale_time_for(msgspec.structs.replace(run, link=None), 1.0) == 1

"""The scale that leaves half the machine idle: the smallest whole one that does."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.autoscale import Capacity, Choice, Demand, choose, demand, peak_payload_bps
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Scale
from emulator.simulate import simulate
from tests.builders import load_plan, node_spec, pair, request, run_spec


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
    wanted = Demand(link_bps=peak_payload_bps(_run(prefills, decodes, payload_bps)), cpu=0.0)
    assert choose([wanted], _capacity(link_bps=capacity_bps)).scale_time == scale


@pytest.mark.parametrize(("cpu", "scale"), [(0.0, 1), (1.0, 1), (1.01, 2), (3.5, 4)])
def test_half_of_the_cores_stay_idle(cpu: float, scale: int) -> None:
    demands = [Demand(link_bps=0.0, cpu=cpu / 2), Demand(link_bps=1e9, cpu=cpu)]
    assert choose(demands, _capacity(cores=2)) == Choice(scale_time=scale, limit="CPU" if scale > 1 else "")


def test_transfers_are_late_by_no_more_than_a_hundredth_of_what_they_take() -> None:
    capacity = _capacity(late_s=0.6e-3)
    assert choose([Demand(link_bps=0.0, cpu=0.0, transfer_s=0.06)], capacity).scale_time == 1
    assert choose([Demand(link_bps=0.0, cpu=0.0, transfer_s=0.005)], capacity) == Choice(
        scale_time=12, limit="short transfers"
    )
    assert choose([Demand(link_bps=0.0, cpu=0.0)], capacity).scale_time == 1, "no transfer is judged"


def test_the_mean_of_judged_transfers_counts() -> None:
    nodes = [msgspec.structs.replace(node, kv_bytes_per_token=100_000) for node in pair()]
    load = load_plan([request("a", prompt_tokens=50), request("b", prompt_tokens=100), request("c", prompt_tokens=300)])
    run = run_spec(nodes, load, payload_bytes_per_s=1e9)
    simulated = simulate(run)
    wanted = demand(run, simulated.records, simulated.steps, _capacity())
    assert wanted.transfer_s == pytest.approx((0.01 + 0.03) / 2), "5 MB are not judged"


def test_what_is_shorter_decides() -> None:
    assert choose([Demand(link_bps=100e9, cpu=3.0)], _capacity(link_bps=40e9)).limit == "links"
    assert choose([Demand(link_bps=100e9, cpu=7.0)], _capacity(link_bps=40e9)).limit == "CPU"


def test_the_busiest_second_counts_steps_tokens_and_bytes() -> None:
    """One prompt of 500 tokens: a step, its KV of 500 kB, and two decode steps, all within the first second."""
    run = run_spec(pair(), load_plan([request(prompt_tokens=500)]))
    simulated = simulate(run)
    capacity = _capacity(byte_cpu_s=1e-6, step_cpu_s=0.1, token_cpu_s=0.01)
    wanted = demand(run, simulated.records, simulated.steps, capacity)
    assert wanted.cpu == pytest.approx(0.5 + 3 * 0.1 + 3 * 0.01)
    scaled = msgspec.structs.replace(run, scale=Scale(bytes=10))
    assert demand(scaled, simulated.records, simulated.steps, capacity).cpu == pytest.approx(0.05 + 0.33)
    assert demand(run, [], [], capacity).cpu == 0.0


def test_scaled_bytes_need_less_and_without_links_nothing_is_needed() -> None:
    assert peak_payload_bps(_run(1, 1, 2e12, scale_bytes=1000)) == pytest.approx(2e9)
    run = run_spec([node_spec()], load_plan())
    assert peak_payload_bps(msgspec.structs.replace(run, link=None)) == 0.0


def _capacity(
    *,
    link_bps: float = 1e12,
    cores: int = 2,
    byte_cpu_s: float = 0.0,
    step_cpu_s: float = 0.0,
    token_cpu_s: float = 0.0,
    late_s: float = 0.0,
) -> Capacity:
    return Capacity(
        link_bps=link_bps,
        cores=cores,
        byte_cpu_s=byte_cpu_s,
        step_cpu_s=step_cpu_s,
        token_cpu_s=token_cpu_s,
        late_s=late_s,
    )

"""Pulled KV in a simulated cluster, instants by hand: who reads when; and as by push where nobody has to wait."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from emulator.core.deployments import Admission, FirstToken
from emulator.core.records import Record
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.workload import PlannedRequest
from emulator.simulate import Simulation, simulate
from tests.builders import by_id, load_plan, node_spec, pair, request, run_spec
from tests.drawn import EVERY_ADMISSION, EVERY_FIRST_TOKEN
from tests.handed_over import handed_over

EXACT = 1e-9


def _run(nodes: Sequence[NodeSpec], requests: Sequence[PlannedRequest], admission: Admission = "dispatch") -> RunSpec:
    """A prompt token takes 1 ms and its KV another one on the link."""
    return run_spec(nodes, load_plan(requests), payload_bytes_per_s=1e6, admission=admission)


def _pulled(run: RunSpec, most: int = 1) -> dict[str, Record]:
    run = handed_over(run, transfer_mode="pull", max_transfers_in_flight=most)
    return by_id(Simulation(run, after_event=Simulation.check_integrity).run().records)


@pytest.mark.parametrize("admission", EVERY_ADMISSION)
@pytest.mark.parametrize("first_token", EVERY_FIRST_TOKEN)
def test_a_lone_request_is_served_alike_by_push_and_by_pull_where_messages_take_no_time(
    first_token: FirstToken, admission: Admission
) -> None:
    run = handed_over(_run(pair(), [request()], admission), first_token=first_token)
    (pushed,) = simulate(run).records
    pulled = _pulled(run)["r0"]
    assert pulled == msgspec.structs.replace(pushed, token_times_s=pulled.token_times_s)
    assert pulled.times() == pytest.approx(pushed.times(), abs=EXACT)


def test_a_prompt_that_waits_for_its_turn_to_be_read_waits_for_the_link() -> None:
    run = run_spec(pair(), load_plan([request("a"), request("b")]), payload_bytes_per_s=5e5)
    records = _pulled(run, 1)
    assert [records[name].prefill_end_s for name in ("a", "b")] == pytest.approx([0.1, 0.2], abs=EXACT)
    assert records["a"].kv_ready_s == pytest.approx(0.1, abs=EXACT)
    assert records["b"].kv_ready_s == pytest.approx(0.2, abs=EXACT), "the wait for a place is the link's"
    assert records["b"].kv_start_s == pytest.approx(0.3, abs=EXACT), "a, of 100 kB at 500 kB/s, is here"


def test_a_read_from_one_node_does_not_wait_for_those_from_another() -> None:
    nodes = [*(node_spec(f"prefill-{n}", role="prefill") for n in (0, 1)), node_spec("decode-0", role="decode")]
    records = _pulled(_run(nodes, [request("long", prompt_tokens=400), request("short", prompt_tokens=50)]))
    assert records["short"].kv_ready_s == pytest.approx(0.05, abs=EXACT), "long has memory before it, and is computed"
    assert records["long"].kv_ready_s == pytest.approx(0.4, abs=EXACT)

"""Both drivers again, with nodes that do what is not their own: conditional disaggregation, mixed pools, switching."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from emulator.core.deployments import Admission, Conditional, FirstToken, RoleSwitching
from emulator.core.roles import Role
from emulator.core.run_spec import RunSpec
from tests.drawn import EVERY_ADMISSION
from tests.test_driver_parity import _check, _id, _runs, _short_of_memory, _slow_unless

LATER: FirstToken = "recompute"
SWITCHING = RoleSwitching(max_queued_prompt_tokens=300, max_kv_usage=0.3)


def _with_roles(
    admission: Admission,
    *roles: Role,
    conditional: Conditional | None = None,
    role_switching: RoleSwitching | None = None,
    first_token: FirstToken = "handoff",
) -> RunSpec:
    """Two prefill and two decode nodes with these roles instead, short of memory so that it matters."""
    run = _runs("2p2d", duration_s=4.0)[-1]
    numbers = dict.fromkeys(roles, 0)
    nodes = []
    for node, role in zip(run.nodes, roles, strict=True):
        nodes.append(msgspec.structs.replace(node, role=role, name=f"{role}-{numbers[role]}"))
        numbers[role] += 1
    router = msgspec.structs.replace(
        run.router,
        conditional=conditional,
        role_switching=role_switching,
        admission=admission,
        first_token=first_token,
    )
    name = "-".join((*roles, admission, "conditional" if conditional else "switching" if role_switching else ""))
    return _short_of_memory(msgspec.structs.replace(run, nodes=tuple(nodes), router=router, deployment=name))


CONDITIONAL = [
    _with_roles(
        admission,
        "prefill", "prefill", "decode", "decode",
        conditional=Conditional(eff_isl_threshold=700, max_prefill_queue_size=3),
        first_token=LATER,
    )
    for admission in EVERY_ADMISSION
]  # fmt: skip
BOTH: list[RunSpec] = list(
    itertools.chain.from_iterable(
        (
            _with_roles(admission, "mixed", "mixed", "mixed", "mixed"),
            _with_roles(admission, "prefill", "mixed", "mixed", "decode"),
            _with_roles(admission, "prefill", "prefill", "decode", "decode", role_switching=SWITCHING),
        )
        for admission in EVERY_ADMISSION
    )
)


@pytest.mark.parametrize("run", [_slow_unless(run.router.admission == "dispatch", run) for run in CONDITIONAL], ids=_id)
def test_prompts_that_stay_at_their_decode_node(run: RunSpec) -> None:
    records = [record for record in _check(run) if record.outcome == "completed"]
    assert {bool(record.kv_bytes) for record in records} == {False, True}


@pytest.mark.parametrize(
    "run",
    [_slow_unless(run.router.admission == "dispatch", run) for run in BOTH],
    ids=_id,
)
def test_nodes_that_prefill_and_decode(run: RunSpec) -> None:
    records = [record for record in _check(run) if record.outcome == "completed"]
    assert {bool(record.kv_bytes) for record in records} == {False, True}

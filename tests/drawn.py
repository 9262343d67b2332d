"""What random clusters draw of how requests are handed over, and when their KV leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from emulator.core.deployments import Admission, FirstToken, Overlap, Preemption, TransferMode
from emulator.core.run_spec import NodeSpec, RunSpec
from tests.handed_over import handed_over
from tests.link_messages import TERMS, over_messages

EVERY_FIRST_TOKEN: tuple[FirstToken, ...] = ("handoff", "prefill", "recompute")
EVERY_ADMISSION: tuple[Admission, ...] = ("dispatch", "decode_reserve_first", "prefill_first")
EVERY_TRANSFER_MODE: tuple[TransferMode, ...] = ("push", "pull")
EVERY_PREEMPTION: tuple[Preemption, ...] = ("recompute", "prefill")
EVERY_OVERLAP: tuple[Overlap, ...] = ("none", "chunk", "layer")
FIRST_TOKENS = st.sampled_from(EVERY_FIRST_TOKEN)


@st.composite
def overlaps(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a node that decide in which parts KV leaves; few layers divide evenly into their groups."""
    overlap = draw(st.sampled_from(EVERY_OVERLAP))
    if overlap != "layer":
        return {"overlap": overlap}
    layers = draw(st.integers(2, 9))
    return {"overlap": overlap, "layers": layers, "layer_groups": draw(st.integers(2, layers))}


def admissions(nodes: Sequence[NodeSpec]) -> st.SearchStrategy[Admission]:
    """Every admission that these nodes allow: none that waits for the prefill where KV leaves before its end."""
    whole = all(node.overlap == "none" for node in nodes if node.role == "prefill")
    return st.sampled_from([a for a in EVERY_ADMISSION if whole or a != "prefill_first"])


@st.composite
def ways_of(draw: st.DrawFn, run: RunSpec) -> RunSpec:
    """The run with its KV pushed or pulled, over a link of any terms, and preempted requests computed anew anywhere."""
    run = handed_over(
        run,
        transfer_mode=draw(st.sampled_from(EVERY_TRANSFER_MODE)),
        preemption=draw(st.sampled_from(EVERY_PREEMPTION)),
        max_transfers_in_flight=draw(st.integers(1, 3)),
    )
    return over_messages(run, **draw(TERMS))

"""Runs whose link has its own terms for messages: what one costs, how many are on the way, who goes first."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from emulator.core.deployments import TransferOrder
from emulator.core.run_spec import RunSpec

TERMS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "message_s": st.sampled_from([0.0, 0.002, 0.05]),
            "max_in_flight": st.integers(1, 3),
            "order": st.sampled_from(["fifo", "fair"]),
        }
    ),
)
"""Keywords of `over_messages`: often none, which leaves a run as it is."""


def over_messages(
    run: RunSpec, *, message_s: float = 0.0, max_in_flight: int = 1, order: TransferOrder = "fifo"
) -> RunSpec:
    """The run over a link with these terms; itself where no KV crosses a network."""
    if run.link is None:
        return run
    link = msgspec.structs.replace(run.link, message_s=message_s, max_in_flight=max_in_flight, order=order)
    return msgspec.structs.replace(run, link=link)

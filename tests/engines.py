"""Engines of one node, and what they tell the router."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

from emulator.core.effects import Effect, Reply
from emulator.core.engine import Engine
from emulator.core.messages import Message
from emulator.core.run_spec import NodeSpec


def engine_of(node: NodeSpec, *, merge_steps: bool = False, name_blocks: bool = False) -> Engine:
    """Its tickets are 1, 2, 3, …, its KV comes in `here`."""
    new_ticket = partial(next, itertools.count(1))
    return Engine(node, new_ticket=new_ticket, kv_endpoint="here", merge_steps=merge_steps, name_blocks=name_blocks)


def replies(effects: Iterable[Effect]) -> list[Message]:
    """The messages to the router among the effects."""
    return [effect.message for effect in effects if isinstance(effect, Reply)]

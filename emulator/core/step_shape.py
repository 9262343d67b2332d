"""What a step computes, as every cost model sees it: counts of tokens, not requests."""

from __future__ import annotations

from typing import NamedTuple

MIXED_NORM = 3.5
"""p of the p-norm that joins a measured prefill and a measured decode in one step: measured sweeps lie at 3 to 4."""


class Chunk(NamedTuple):
    """Part of a prompt: `tokens` computed in this step, `context` tokens of it computed before."""

    tokens: int
    context: int


class StepShape(NamedTuple):
    """What a step computes: chunks of prompts, and one token for each of `decode_batch` sequences.

    `decode_context_sum` is the sum of tokens that these sequences attend to.
    """

    chunks: tuple[Chunk, ...]
    decode_batch: int
    decode_context_sum: int


def mixed_ms(prefill_ms: float, decode_base_ms: float) -> float:
    """A prefill and the part of a decode step that reads the weights, which both hold, in one step."""
    joined: float = (prefill_ms**MIXED_NORM + decode_base_ms**MIXED_NORM) ** (1 / MIXED_NORM)
    return joined

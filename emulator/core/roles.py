"""What a node of a role may do with KV: send what it prefills for others, take in what others have prefilled."""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "decode", "colocated", "mixed"]


def sends_kv(role: Role, *, switching: bool) -> bool:
    """Whether KV may leave such a node: it computes prompts, or helps out with them (`role_switching`)."""
    return role in ("prefill", "mixed") or (switching and role == "decode")


def takes_in_kv(role: Role, *, switching: bool) -> bool:
    """Whether KV may come to such a node: it decodes, or helps out with that (`role_switching`)."""
    return role in ("decode", "mixed") or (switching and role == "prefill")

"""Routers that know some nodes, and requests submitted to them."""

from __future__ import annotations

from typing import Any

from emulator.core.effects import Send
from emulator.core.messages import Hello, Submit
from emulator.core.roles import Role
from emulator.core.router import Router
from emulator.core.run_spec import RouterSpec


def known_router(
    *, prefill: int = 0, decode: int = 0, mixed: int = 0, colocated: int = 0, blocks: int = 1_000, **ways: Any
) -> Router:
    """A router that knows nodes named `prefill-0` …, of blocks of 16 tokens, and the clients `client` and `other`.

    `ways` are fields of its RouterSpec.
    """
    counts: dict[Role, int] = {"prefill": prefill, "decode": decode, "mixed": mixed, "colocated": colocated}
    ways = {"routing": "least_loaded", "node_lost_s": 5.0, "request_s": 60.0, **ways}
    router = Router(RouterSpec(disaggregated=prefill + decode + mixed > 0, **ways))
    for role, count in counts.items():
        for n in range(count):
            router.join(Hello(f"{role}-{n}", role, "", blocks), 16, 0.0)
    for client in ("client", "other"):
        router.join(Hello(client, "client", ""), 1, 0.0)
    return router


def submit(router: Router, request_id: str, prompt_tokens: int = 100, max_tokens: int = 10) -> list[Send]:
    """What the router does with a request of `client`."""
    sends = router.handle("client", Submit(request_id, prompt_tokens, max_tokens), 0.0)
    router.check_integrity()
    return sends

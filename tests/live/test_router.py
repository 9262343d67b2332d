"""The router's process on its own, with peers that are no more than sockets."""

from __future__ import annotations

import asyncio
import time

import pytest

from emulator.core.errors import DeadlineError
from emulator.core.messages import Begin, Hello, Stop
from emulator.live.control import PeerSocket
from emulator.live.router import RouterProcess
from emulator.live.status import Assignment
from tests.builders import load_plan, node_spec, run_spec

pytestmark = pytest.mark.live

JOIN_S = 20.0
REFUSED_S = 0.5


async def test_a_node_that_comes_once_the_run_has_begun_is_not_let_in_and_a_client_is() -> None:
    node = node_spec()
    router = RouterProcess(Assignment(kind="router", name="router", run=run_spec([node], load_plan()), secret="s"))
    serving = asyncio.create_task(router.serve())
    hello = Hello(node.name, "colocated", "s", node.kv_blocks)
    peers = {name: PeerSocket(router.endpoint, name) for name in ("client", "bench", node.name)}
    await peers[node.name].join(hello, JOIN_S)
    await peers["client"].join(Hello("client", "client", "s"), JOIN_S)
    peers["client"].send(Begin(time.monotonic()))
    peers.pop(node.name).close()
    await peers["bench"].join(Hello("bench", "client", "s"), JOIN_S)
    peers["again"] = PeerSocket(router.endpoint, node.name)
    with pytest.raises(DeadlineError, match="did not answer"):
        await peers["again"].join(hello, REFUSED_S)
    peers["bench"].send(Stop())
    for peer in peers.values():
        peer.close()
    await asyncio.wait_for(serving, JOIN_S)

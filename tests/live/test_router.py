"""The router's process on its own, with peers that are no more than sockets."""

from __future__ import annotations

import asyncio
import time

import pytest

from emulator.core.errors import DeadlineError
from emulator.core.message_codec import decode_to_client, decode_to_node
from emulator.core.messages import Begin, EndRecord, Generate, Hello, Message, Stop, Submit
from emulator.core.record_limits import RecordLimits
from emulator.live.control import PeerSocket
from emulator.live.router import RouterProcess
from emulator.live.status import Assignment, RecordEnded
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


async def _next(peer: PeerSocket, kind: type[Message], *, node: bool = False) -> Message:
    """The next message of this kind that a peer gets."""
    decode = decode_to_node if node else decode_to_client
    while not isinstance(message := decode(await asyncio.wait_for(peer.receive(), JOIN_S)), kind):
        pass
    return message


async def test_the_record_ends_for_all_before_the_request_that_is_too_much_and_for_those_that_come_later() -> None:
    node = node_spec()
    told: list[RecordEnded] = []
    task = Assignment(
        kind="router", name="router", run=run_spec([node], load_plan()), secret="s", record=RecordLimits(requests=3)
    )
    router = RouterProcess(task, told.append)
    serving = asyncio.create_task(router.serve())
    peers = {name: PeerSocket(router.endpoint, name) for name in (node.name, "client", "bench", "late")}
    working = peers[node.name]
    await working.join(Hello(node.name, "colocated", "s", node.kv_blocks), JOIN_S)
    for name in ("client", "bench"):
        await peers[name].join(Hello(name, "client", "s"), JOIN_S)
    peers["client"].send(Begin(time.monotonic()))
    for request_id, name in (("a", "client"), ("b", "bench"), ("c", "client")):
        peers[name].send(Submit(request_id, 10, 2))
        assert await _next(working, Generate, node=True) == Generate(request_id, 10, 2)
    assert not told
    peers["bench"].send(Submit("d", 10, 2))
    assert await _next(working, EndRecord, node=True) == EndRecord()
    assert await _next(working, Generate, node=True) == Generate("d", 10, 2), "it is served all the same"
    assert await _next(peers["client"], EndRecord) == EndRecord(2)
    assert await _next(peers["bench"], EndRecord) == EndRecord(1)
    await peers["late"].join(Hello("late", "client", "s"), JOIN_S)
    assert await _next(peers["late"], EndRecord) == EndRecord()
    assert told == [RecordEnded(3, "3 requests")]
    peers["bench"].send(Stop())
    for peer in peers.values():
        peer.close()
    await asyncio.wait_for(serving, JOIN_S)

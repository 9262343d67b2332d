"""The control network's sockets: loopback in the clear, anything else under CURVE, nothing that waits for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from emulator.core.errors import ConfigError, DeadlineError
from emulator.core.message_codec import decode_to_node, decode_to_router
from emulator.core.messages import Abort, ClockReading, Hello, ReadClock, Welcome
from emulator.live.control import CurveKeys, PeerSocket, RouterSocket

pytestmark = pytest.mark.live

HELLO = Hello("decode-0", "decode", "secret")


AHEAD_S = 1_000.0


async def _answer(router: RouterSocket) -> None:
    """A router whose clock is ahead, and that has something else to say before its first reading."""
    peer, data = await router.receive()
    assert decode_to_router(data) == HELLO
    assert router.send(peer, Welcome())
    assert router.send(peer, Abort("early"))
    while True:
        _, data = await router.receive()
        message = decode_to_router(data)
        if not isinstance(message, ReadClock):
            assert message == Abort("a")
            return
        assert router.send(peer, ClockReading(message.sent_s, time.monotonic() + AHEAD_S))


@pytest.mark.parametrize("keys", [None, CurveKeys.new()], ids=["clear", "curve"])
async def test_a_peer_joins_and_speaks(keys: CurveKeys | None) -> None:
    router = RouterSocket("tcp://127.0.0.1:*", keys)
    peer = PeerSocket(router.endpoint, "decode-0", keys.public if keys else "")
    try:
        answering = asyncio.create_task(_answer(router))
        offset = await peer.join(HELLO, 10)
        assert abs(offset.seconds - AHEAD_S) <= offset.uncertainty_s < 0.1
        assert decode_to_node(await peer.receive()) == Abort("early")
        assert peer.send(Abort("a"))
        await answering
    finally:
        peer.close(0)
        router.close(0)


async def test_a_peer_with_another_routers_key_is_not_heard() -> None:
    router = RouterSocket("tcp://127.0.0.1:*", CurveKeys.new())
    peer = PeerSocket(router.endpoint, "decode-0", CurveKeys.new().public)
    try:
        with pytest.raises(DeadlineError, match=r"decode-0: the router did not answer within 0\.3 s"):
            await peer.join(HELLO, 0.3)
    finally:
        peer.close(0)
        router.close(0)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://192.0.2.1:5555", "tcp://example:1", "tcp://[::]:*"])
async def test_without_keys_only_loopback_is_allowed(address: str) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        RouterSocket(address)
    with pytest.raises(ConfigError, match="loopback"):
        PeerSocket(address, "decode-0")


async def test_a_peer_that_is_gone_is_told_and_not_waited_for() -> None:
    router = RouterSocket("tcp://127.0.0.1:*")
    try:
        assert not router.send("nobody", Welcome())
    finally:
        router.close(0)


async def test_a_taken_port_is_said_to_be_taken() -> None:
    router = RouterSocket("tcp://127.0.0.1:*")
    try:
        with pytest.raises(ConfigError, match="control_port = 0"):
            RouterSocket(router.endpoint)
    finally:
        router.close(0)

"""Control messages on the wire: one msgpack map each.

Decoding is strict and bounded: unknown types and fields, wrong types and oversized payloads raise ProtocolError.
"""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from emulator.core.errors import ProtocolError
from emulator.core.messages import Message, ToClient, ToNode, ToRouter

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


def encode(message: Message) -> bytes:
    """One message as msgpack."""
    packed = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def decode_to_router(data: bytes) -> ToRouter:
    """Strictly decode what arrives at the router; raises ProtocolError."""
    message: ToRouter = _convert(data, ToRouter)
    return message


def decode_to_node(data: bytes) -> ToNode:
    """Strictly decode what arrives at a node; raises ProtocolError."""
    message: ToNode = _convert(data, ToNode)
    return message


def decode_to_client(data: bytes) -> ToClient:
    """Strictly decode what arrives at a client; raises ProtocolError."""
    message: ToClient = _convert(data, ToClient)
    return message


def _convert(data: bytes, kind: Any) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a control message of {len(data)} bytes is above {MAX_MESSAGE_BYTES}")
    try:
        return msgspec.convert(msgpack.unpackb(data), kind)
    except (msgspec.ValidationError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a control message: {error}") from None

"""The router's side of the hand-over: what a request's two nodes are told of each other, and when.

They meet through the ticket that the decode node issues once it has reserved memory. Where KV is pushed, the ticket
goes on to the prefill node at once, which sends KV as it is computed. Where it is pulled, the decode node is told when
the prompt is computed, and the ticket goes on when it asks for the KV; a prefill that has to wait for memory is
admitted by a word of its own.
"""

from __future__ import annotations

from emulator.core.effects import Send
from emulator.core.messages import Admit, KvComputed, Prefill, ReadKv, Reserve, Reserved, SendKv
from emulator.core.placement import Node, Request
from emulator.core.run_spec import RouterSpec


def prefill(spec: RouterSpec, request: Request, node: Node) -> Send:
    """Have a prompt computed, for another node to decode."""
    wait = spec.admission == "decode_reserve_first"
    return Send(node.name, Prefill(request.attempt_id, request.prompt_tokens, request.max_tokens, await_ticket=wait))


def reserve(spec: RouterSpec, request: Request, source: Node, node: Node, *, computed: bool = False) -> Send:
    """Ask a decode node for memory, and to go on from the first token as it is to be."""
    message = Reserve(
        request.attempt_id,
        request.prompt_tokens,
        request.max_tokens,
        first_token=spec.first_token,
        computed=computed and spec.transfer_mode == "pull",
        source=source.name,
    )
    return Send(node.name, message)


def ticket(spec: RouterSpec, request: Request, message: Reserved | ReadKv) -> list[Send]:
    """A decode node has memory for a prompt, or asks for its KV."""
    if request.prefill is None or request.decode is None:
        return []
    if spec.transfer_mode == "push" or isinstance(message, ReadKv):
        readable_s = message.readable_s if isinstance(message, ReadKv) else None
        send = SendKv(request.attempt_id, message.ticket, message.endpoint, request.decode.name, readable_s)
        return [Send(request.prefill.name, send)]
    waits = spec.admission == "decode_reserve_first"
    return [Send(request.prefill.name, Admit(request.attempt_id))] if waits else []


def computed(spec: RouterSpec, request: Request) -> list[Send]:
    """A prompt is computed whose decode node has been asked for memory already."""
    if spec.transfer_mode == "push" or request.decode is None:
        return []
    return [Send(request.decode.name, KvComputed(request.attempt_id))]

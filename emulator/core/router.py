"""The router as a state machine: places requests on nodes, carries tickets and tokens, survives lost nodes.

Placement sends a request to a prefill and a decode node at the same time; they meet through the ticket that the
decode node issues once it has reserved memory. A node knows a request by an id of its own for each attempt, so that
what a lost attempt still says can never be taken for the present one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from emulator.core.deploy import RouterSpec
from emulator.core.messages import (
    Abort,
    Finished,
    FinishReason,
    Generate,
    Heartbeat,
    Hello,
    KvReady,
    KvReceived,
    Message,
    NodeFinish,
    Prefill,
    PrefillDone,
    Rejected,
    Release,
    Reserve,
    Reserved,
    SendKv,
    StepTokens,
    Submit,
    TokenCount,
    Tokens,
    ToRouter,
    Welcome,
)
from emulator.core.records import RequestTimes
from emulator.core.specs import Role

MAX_ATTEMPTS = 3


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send this message to that peer."""

    peer: str
    message: Message


@dataclass(slots=True, eq=False)
class Node:
    """A node as the router sees it."""

    name: str
    role: Role
    capacity_tokens: int
    heard_s: float
    requests: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request in the cluster. `attempt_id` is what nodes call it; the nodes are None once they are done with it."""

    request_id: str
    client: str
    prompt_tokens: int
    max_tokens: int
    submitted_s: float
    attempt: int = 0
    attempt_id: str = ""
    prefill: Node | None = None
    decode: Node | None = None
    prefill_name: str | None = None
    decode_name: str | None = None
    prefilling: bool = False
    emitted: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)


_LOAD: Mapping[Role, Callable[[Node], tuple[int, int]]] = {
    "prefill": lambda node: (node.prefill_tokens, node.requests),
    "decode": lambda node: (node.kv_tokens - node.capacity_tokens, node.requests),
    "colocated": lambda node: (node.requests, node.prefill_tokens),
}


class Router:
    """All live requests and the nodes that serve them. Instants are model seconds."""

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self._nodes: dict[str, Node] = {}
        self._by_role: dict[Role, list[Node]] = {}
        self._clients: set[str] = set()
        self._requests: dict[str, Request] = {}
        self._attempts: dict[str, Request] = {}
        self._turn: dict[Role, int] = {}
        self._ended: set[str] = set()
        self._ended_before: set[str] = set()
        self._swept_s = 0.0
        self.ignored = 0
        self.lost_nodes: list[str] = []

    @property
    def live_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    # --- inputs -----------------------------------------------------------------------------------------------

    def join(self, hello: Hello, block_size: int, now_s: float) -> None:
        """A peer has introduced itself."""
        if hello.role == "client":
            self._clients.add(hello.name)
        else:
            self._nodes[hello.name] = Node(hello.name, hello.role, hello.kv_blocks * block_size, now_s)
            self._group_nodes()

    def handle(self, peer: str, message: ToRouter, now_s: float) -> list[Send]:
        """A message from a peer that has joined."""
        if (node := self._nodes.get(peer)) is not None:
            node.heard_s = now_s
            return self._from_node(node, message)
        if peer in self._clients:
            return self._from_client(peer, message, now_s)
        self.ignored += 1
        return []

    def lost(self, peer: str) -> list[Send]:
        """A peer is gone: its requests go to other nodes when no token has been sent yet, else they fail."""
        self._clients.discard(peer)
        node = self._nodes.pop(peer, None)
        if node is not None:
            self.lost_nodes.append(peer)
            self._group_nodes()
        sends: list[Send] = []
        for request in list(self._requests.values()):
            if request.client == peer:
                sends += self._end(request, "aborted", "", tell_client=False)
            elif node is not None and node in (request.prefill, request.decode):
                sends += self._retry(request, f"node {peer} was lost")
        return sends

    def tick(self, now_s: float) -> list[Send]:
        """Once in a while: nodes that fell silent are lost, requests past their deadline fail."""
        sends: list[Send] = []
        for node in list(self._nodes.values()):
            if now_s - node.heard_s > self._spec.node_lost_s:
                sends += self.lost(node.name)
        for request in list(self._requests.values()):
            if now_s - request.submitted_s > self._spec.request_s:
                sends += self._end(request, "error", f"not finished within {self._spec.request_s:g} s")
        if now_s - self._swept_s >= self._spec.node_lost_s:
            self._ended_before, self._ended, self._swept_s = self._ended, set(), now_s
        return sends

    # --- clients ----------------------------------------------------------------------------------------------

    def _from_client(self, client: str, message: ToRouter, now_s: float) -> list[Send]:
        match message:
            case Submit(request_id=request_id):
                if refusal := self._id_refusal(request_id):
                    return [Send(client, Finished(request_id, "error", refusal))]
                request = Request(request_id, client, message.prompt_tokens, message.max_tokens, now_s)
                self._requests[request_id] = request
                return self._dispatch(request)
            case Abort(request_id=request_id):
                aborted = self._requests.get(request_id)
                if aborted is not None and aborted.client == client:
                    return self._end(aborted, "aborted", "")
                return []
        self.ignored += 1
        return []

    def _id_refusal(self, request_id: str) -> str:
        """Why a request may not have this id: what nodes still say of another would be taken for it."""
        if "~" in request_id:
            return "a request id must not contain ~"
        if request_id in self._requests:
            return "this request id is in use"
        if request_id in self._ended or request_id in self._ended_before:
            return "this request id was in use until just now"
        return ""

    def _dispatch(self, request: Request) -> list[Send]:
        retry = f"~{request.attempt}" if request.attempt else ""
        request.attempt_id = request.request_id + retry
        request.times = RequestTimes()
        request.prefilling = True
        size = (request.attempt_id, request.prompt_tokens, request.max_tokens)
        if self._spec.disaggregated:
            prefill, decode = self._pick("prefill", request), self._pick("decode", request)
            if prefill is None or decode is None:
                return self._end(request, "error", f"no {'decode' if prefill else 'prefill'} node is left")
            sends = [Send(decode.name, Reserve(*size)), Send(prefill.name, Prefill(*size))]
        else:
            prefill = decode = self._pick("colocated", request)
            if prefill is None or decode is None:
                return self._end(request, "error", "no node is left")
            sends = [Send(prefill.name, Generate(*size))]
        self._attempts[request.attempt_id] = request
        request.prefill, request.decode = prefill, decode
        request.prefill_name, request.decode_name = prefill.name, decode.name
        prefill.prefill_tokens += request.prompt_tokens
        decode.kv_tokens += request.prompt_tokens + request.max_tokens
        for node in {prefill.name: prefill, decode.name: decode}.values():
            node.requests += 1
        return sends

    def _pick(self, role: Role, request: Request) -> Node | None:
        """Round-robin, or the least loaded: prefill by queued prompt tokens, decode by free KV, else by requests.

        Nodes on which the request can never fit come into question only when it fits on none, to refuse it.
        """
        need = request.prompt_tokens + (0 if role == "prefill" else request.max_tokens)
        nodes = self._by_role.get(role, [])
        nodes = [node for node in nodes if node.capacity_tokens >= need] or nodes
        if not nodes:
            return None
        if self._spec.routing == "round_robin":
            turn = self._turn.get(role, 0)
            self._turn[role] = turn + 1
            return nodes[turn % len(nodes)]
        return min(nodes, key=_LOAD[role])

    def _group_nodes(self) -> None:
        self._by_role = {}
        for node in self._nodes.values():
            self._by_role.setdefault(node.role, []).append(node)

    # --- nodes ------------------------------------------------------------------------------------------------

    def _from_node(self, node: Node, message: ToRouter) -> list[Send]:
        match message:
            case StepTokens():
                return self._tokens(node, message)
            case PrefillDone() | KvReady() | KvReceived() | Reserved() | Rejected():
                request = self._attempts.get(message.request_id)
                if request is None or node not in (request.prefill, request.decode):
                    return []
                return self._progress(request, message)
            case Heartbeat():
                return [Send(node.name, Welcome())]
        self.ignored += 1
        return []

    def _progress(
        self, request: Request, message: PrefillDone | KvReady | KvReceived | Reserved | Rejected
    ) -> list[Send]:
        match message:
            case PrefillDone() | KvReady():
                request.times = request.times.merged(message.times)
                if isinstance(message, PrefillDone):
                    self._prefilled(request)
            case KvReceived():
                request.times = request.times.merged(message.times)
                return self._release_prefill(request)
            case Reserved() if request.prefill is not None:
                ticket = SendKv(request.attempt_id, message.ticket, message.endpoint)
                return [Send(request.prefill.name, ticket)]
            case Rejected():
                return self._end(request, "error", message.reason)
        return []

    def _tokens(self, node: Node, message: StepTokens) -> list[Send]:
        """Fan one step's tokens out: a message a client, then the requests that ended."""
        by_client: dict[str, list[TokenCount]] = {}
        for attempt_id, n in ((t.request_id, t.n) for t in message.tokens):
            request = self._attempts.get(attempt_id)
            if request is None or request.decode is not node:
                continue
            request.emitted += n
            self._prefilled(request)
            by_client.setdefault(request.client, []).append(TokenCount(request.request_id, n))
        sends = [Send(client, Tokens(tuple(tokens))) for client, tokens in by_client.items()]
        for finish in message.finished:
            sends += self._finish(node, finish)
        return sends

    def _finish(self, node: Node, finish: NodeFinish) -> list[Send]:
        request = self._attempts.get(finish.request_id)
        if request is None or request.decode is not node:
            return []
        request.times = request.times.merged(finish.times)
        sends = self._release_prefill(request)
        self._leave_decode(request)
        return sends + self._end(request, finish.reason, "")

    # --- endings ----------------------------------------------------------------------------------------------

    def _retry(self, request: Request, why: str) -> list[Send]:
        if request.emitted:
            return self._end(request, "error", f"{why} after {request.emitted} tokens")
        sends = self._leave(request)
        request.attempt += 1
        if request.attempt >= MAX_ATTEMPTS:
            return sends + self._end(request, "error", f"{why}, and {MAX_ATTEMPTS} attempts failed")
        return sends + self._dispatch(request)

    def _end(self, request: Request, reason: FinishReason, detail: str, *, tell_client: bool = True) -> list[Send]:
        sends = self._leave(request)
        self._requests.pop(request.request_id, None)
        self._ended.add(request.request_id)
        if not tell_client:
            return sends
        finished = Finished(
            request.request_id, reason, detail, request.prefill_name, request.decode_name, request.times
        )
        return [*sends, Send(request.client, finished)]

    def _leave(self, request: Request) -> list[Send]:
        """Make every node that still serves the request forget it."""
        names = {node.name for node in (request.prefill, request.decode) if node is not None}
        self._prefilled(request)
        if request.prefill is not None and request.prefill is not request.decode:
            request.prefill.requests -= 1
        request.prefill = None
        self._leave_decode(request)
        self._attempts.pop(request.attempt_id, None)
        return [Send(name, Abort(request.attempt_id)) for name in sorted(names) if name in self._nodes]

    def _prefilled(self, request: Request) -> None:
        if request.prefilling and request.prefill is not None:
            request.prefill.prefill_tokens -= request.prompt_tokens
        request.prefilling = False

    def _release_prefill(self, request: Request) -> list[Send]:
        """The decode node has the KV: the prefill node may free its blocks."""
        node = request.prefill
        if node is None or node is request.decode:
            return []
        self._prefilled(request)
        request.prefill = None
        node.requests -= 1
        return [Send(node.name, Release(request.attempt_id))]

    def _leave_decode(self, request: Request) -> None:
        if request.decode is None:
            return
        request.decode.requests -= 1
        request.decode.kv_tokens -= request.prompt_tokens + request.max_tokens
        if request.prefill is request.decode:
            self._prefilled(request)
            request.prefill = None
        request.decode = None

    def check_integrity(self) -> None:
        """The load that is kept of each node equals what its requests add up to."""
        for node in self._nodes.values():
            here = [r for r in self._requests.values() if node in (r.prefill, r.decode)]
            assert node.requests == len(here), "a node's request count is off"
            prefilling = sum(r.prompt_tokens for r in here if r.prefill is node and r.prefilling)
            assert node.prefill_tokens == prefilling, "a node's prefill load is off"
            kv = sum(r.prompt_tokens + r.max_tokens for r in here if r.decode is node)
            assert node.kv_tokens == kv, "a node's KV load is off"
        assert self._attempts.keys() == {r.attempt_id for r in self._requests.values()}, "attempts out of step"

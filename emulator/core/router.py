"""The router as a state machine: places requests on nodes, carries tickets and tokens, survives lost nodes.

When a decode node is asked for memory is the *admission*: `dispatch` tells it and the prefill node at once; so does
`decode_reserve_first`, but the prefill waits for the memory; `prefill_first` chooses and asks a decode node when the
prompt is computed (`core.handover` has what they are then told of each other). With `first_token = "prefill"` the
router streams the first token as soon as it knows that it was sampled; a request for no more than that never meets a
decode node.

With `preemption = "prefill"` a decode node gives up what it has no memory for any more: the request starts anew, with
all its tokens so far as the prompt, and its stream goes on.

Which nodes are asked first, one that serves a request alone or two, `core.dispatch` says.

A node knows a request by an id of its own for each attempt, so that what a lost attempt still says can never be taken
for the present one.

Where two nodes serve a request, the end of it may be here before what the prefill node says of its part. Tokens are
passed on at once; the client is told of the end when the times of both are in, or will not come any more.
"""

from __future__ import annotations

import math

from emulator.core import handover
from emulator.core.dispatch import Alone, HandOver, choose
from emulator.core.effects import Send
from emulator.core.messages import (
    Abort,
    ClusterLoad,
    FailureCause,
    Finished,
    FinishReason,
    Forget,
    Generate,
    Heartbeat,
    Hello,
    KvReady,
    KvReceived,
    NodeFinish,
    NodeLoad,
    Preempted,
    PrefillDone,
    ReadKv,
    ReadLoad,
    Rejected,
    Release,
    Reserved,
    StepTokens,
    Submit,
    TokenCount,
    Tokens,
    ToRouter,
    Welcome,
)
from emulator.core.placement import ATTEMPT, Node, Phase, Placement, Request, request_id_of
from emulator.core.recent_ids import RecentIds
from emulator.core.records import RequestTimes
from emulator.core.run_spec import RouterSpec

MAX_ATTEMPTS = 3


class Router:
    """All live requests and the nodes that serve them. Instants are model seconds."""

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self._nodes = Placement(spec.routing, spec.role_switching)
        self._clients: set[str] = set()
        self._requests: dict[str, Request] = {}
        self._attempts: dict[str, Request] = {}
        self._ended = RecentIds(spec.node_lost_s)
        self._away: dict[str, Node] = {}
        self.ignored = 0
        self.lost_nodes: list[str] = []

    @property
    def live_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def loads(self) -> tuple[NodeLoad, ...]:
        """What each node that is there said last of its load."""
        return tuple(NodeLoad(node.name, node.said) for node in self._nodes if node.said is not None)

    @property
    def away(self) -> tuple[str, ...]:
        """Nodes that are lost and have not come back; `lost_nodes` names all that ever were, once for each time."""
        return tuple(self._away)

    # --- inputs -----------------------------------------------------------------------------------------------

    def join(self, hello: Hello, block_size: int, now_s: float) -> None:
        """A peer has introduced itself."""
        if hello.role == "client":
            self._clients.add(hello.name)
        else:
            self._nodes.join(Node(hello.name, hello.role, hello.kv_blocks * block_size, now_s))

    def handle(self, peer: str, message: ToRouter, now_s: float) -> list[Send]:
        """A message from a peer that has joined."""
        if (node := self._nodes.get(peer)) is not None:
            node.heard_s = now_s
            return self._from_node(node, message)
        if peer in self._clients:
            return self._from_client(peer, message, now_s)
        if isinstance(message, Heartbeat) and peer in self._away:
            return self._take_back(self._away.pop(peer), message, now_s)
        self.ignored += 1
        return []

    def _take_back(self, lost: Node, message: Heartbeat, now_s: float) -> list[Send]:
        """A node that had fallen silent speaks again: it serves on, without the requests that it had."""
        self._nodes.join(Node(lost.name, lost.role, lost.capacity_tokens, now_s, said=message))
        return [Send(lost.name, Forget()), Send(lost.name, Welcome())]

    def lost(self, peer: str) -> list[Send]:
        """A peer is gone: requests go from a node to others when no token has been sent yet, else they fail.

        Those of a client are aborted; how they ended is said to it as to one that is there.
        """
        self._clients.discard(peer)
        node = self._nodes.lose(peer)
        if node is not None:
            self.lost_nodes.append(peer)
            self._away[peer] = node
        sends: list[Send] = []
        for request in list(self._requests.values()):
            if request.client == peer:
                sends += self._end(request, "aborted", "")
            elif node is not None and node in request.nodes:
                sends += self._retry(request, f"node {peer} was lost")
            elif node is not None and node is request.reporter:
                request.reporter = None
                sends += self._end_if_told(request)
        return sends

    def dismiss(self, peer: str) -> None:
        """A node has nothing more to say: from now on its silence is no loss."""
        if (node := self._nodes.get(peer)) is not None:
            node.heard_s = math.inf

    def tick(self, now_s: float) -> list[Send]:
        """Once in a while: nodes that fell silent are lost, requests past their deadline fail."""
        sends: list[Send] = []
        for node in self._nodes:
            if now_s - node.heard_s > self._spec.node_lost_s:
                sends += self.lost(node.name)
        for request in list(self._requests.values()):
            if now_s - request.submitted_s > self._spec.request_s:
                late = f"not finished within {self._spec.request_s:g} s"
                sends += self._end(request, "error", late, cause="timeout")
        self._ended.forget(now_s)
        return sends

    # --- clients ----------------------------------------------------------------------------------------------

    def _from_client(self, client: str, message: ToRouter, now_s: float) -> list[Send]:
        match message:
            case Submit(request_id=request_id):
                if refusal := self._id_refusal(request_id):
                    return [Send(client, Finished(request_id, "error", refusal, cause="impossible"))]
                request = Request(request_id, client, message.prompt_tokens, message.max_tokens, now_s)
                self._requests[request_id] = request
                return self._dispatch(request)
            case Abort(request_id=request_id):
                aborted = self._requests.get(request_id)
                if aborted is not None and aborted.client == client:
                    return self._end(aborted, "aborted", "")
                return []
            case ReadLoad():
                return [Send(client, ClusterLoad(self.loads))]
        self.ignored += 1
        return []

    def _id_refusal(self, request_id: str) -> str:
        """Why a request may not have this id: what nodes still say of another would be taken for it."""
        if ATTEMPT in request_id:
            return f"a request id must not contain {ATTEMPT}"
        if request_id in self._requests:
            return "this request id is in use"
        if request_id in self._ended:
            return "this request id was in use until just now"
        return ""

    # --- dispatch ---------------------------------------------------------------------------------------------

    def _dispatch(self, request: Request) -> list[Send]:
        """Give a request to the nodes that are asked first."""
        request.begin_attempt()
        chosen = choose(self._spec, self._nodes, request)
        if isinstance(chosen, Alone):
            return self._serve_alone(request, chosen.node)
        if isinstance(chosen, HandOver):
            return self._hand_over(request, chosen.prefill, chosen.decode)
        return self._no_node(request, chosen.phase)

    def _serve_alone(self, request: Request, node: Node) -> list[Send]:
        """Have one node serve a request all by itself."""
        self._attempts[request.attempt_id] = request
        self._nodes.give_prefill(request, node)
        self._nodes.give_decode(request, node)
        return [Send(node.name, Generate(request.attempt_id, request.prompt_tokens, request.max_tokens))]

    def _hand_over(self, request: Request, prefill: Node, decode: Node | None) -> list[Send]:
        """Have one node compute a request's prompt, and another one decode: this, unless that is chosen later."""
        self._attempts[request.attempt_id] = request
        request.moves = True
        request.expect_report(prefill)
        self._nodes.give_prefill(request, prefill)
        reserve: list[Send] = []
        if self._spec.admission == "prefill_first":
            self._nodes.pledge(request, decode)
        elif decode is not None:
            self._nodes.give_decode(request, decode)
            reserve = [handover.reserve(self._spec, request, prefill, decode)]
        return [*reserve, handover.prefill(self._spec, request, prefill)]

    # --- nodes ------------------------------------------------------------------------------------------------

    def _from_node(self, node: Node, message: ToRouter) -> list[Send]:
        match message:
            case StepTokens():
                return self._tokens(node, message)
            case PrefillDone() | KvReady() | KvReceived() | Reserved() | ReadKv() | Preempted() | Rejected():
                sends = self._reported(node, message) if isinstance(message, PrefillDone | KvReady) else []
                request = self._attempts.get(message.request_id)
                if request is None or node not in (request.prefill, request.decode):
                    return sends
                return sends + self._progress(request, message)
            case Heartbeat():
                node.said = message
                return [Send(node.name, Welcome())]
        self.ignored += 1
        return []

    def _reported(self, node: Node, message: PrefillDone | KvReady) -> list[Send]:
        """When a prompt was computed or handed over, which may be told after all that comes of it."""
        request = self._requests.get(request_id_of(message.request_id))
        if request is None or request.reporter is not node or request.reported_id != message.request_id:
            return []
        if isinstance(message, PrefillDone) and self._spec.first_token == "prefill":
            request.report(RequestTimes(streamed_s=message.times.prefill_end_s))
        request.report(message.times)
        return self._end_if_told(request)

    def _progress(
        self,
        request: Request,
        message: PrefillDone | KvReady | KvReceived | Reserved | ReadKv | Preempted | Rejected,
    ) -> list[Send]:
        match message:
            case PrefillDone():
                return self._prefill_done(request)
            case KvReceived():
                request.note(message.times)
                return self._first_token(request) + self._release_prefill(request)
            case Reserved() | ReadKv():
                return handover.ticket(self._spec, request, message)
            case Preempted():
                return self._preempted(request, message)
            case Rejected():
                return self._end(request, "error", message.reason, cause=message.cause)
        return []

    def _prefill_done(self, request: Request) -> list[Send]:
        """A prompt is computed: its first token may be due, or only now a place to decode."""
        self._nodes.prefilled(request)
        sends = self._first_token(request)
        if request.decode is not None or request.prefill is None:
            return sends + handover.computed(self._spec, request)
        decode = self._nodes.pick_receiver(request)
        if decode is None:
            return sends + self._no_node(request, "decode")
        self._nodes.give_decode(request, decode)
        return [*sends, handover.reserve(self._spec, request, request.prefill, decode, computed=True)]

    def _preempted(self, request: Request, message: Preempted) -> list[Send]:
        """A node had no memory for a request any more: where it has given it up, others go on from what there is."""
        request.note(message.times)
        request.times = request.times.merged(RequestTimes(preemptions=1))
        if message.recomputes:
            return []
        sends = self._release_prefill(request)
        self._nodes.leave(request)
        self._attempts.pop(request.attempt_id)
        request.restart(message.generated)
        return sends + self._dispatch(request)

    def _first_token(self, request: Request) -> list[Send]:
        """Where the token that prefill samples is streamed at once: it exists, by the first message that shows it."""
        if self._spec.first_token != "prefill" or request.emitted > request.resumed:
            return []
        request.emitted += 1
        return [Send(request.client, Tokens((TokenCount(request.request_id, 1),)))]

    def _tokens(self, node: Node, message: StepTokens) -> list[Send]:
        """Fan one step's tokens out: a message a client, then the requests that ended."""
        by_client: dict[str, list[TokenCount]] = {}
        for attempt_id, n in ((t.request_id, t.n) for t in message.tokens):
            request = self._attempts.get(attempt_id)
            if request is None or request.decode is not node:
                continue
            request.emitted += n
            self._nodes.prefilled(request)
            by_client.setdefault(request.client, []).append(TokenCount(request.request_id, n))
        sends = [Send(client, Tokens(tuple(tokens))) for client, tokens in by_client.items()]
        for finish in message.finished:
            sends += self._finish(node, finish)
        return sends

    def _finish(self, node: Node, finish: NodeFinish) -> list[Send]:
        request = self._attempts.get(finish.request_id)
        if request is None or request.decode is not node:
            return []
        request.note(finish.times)
        sends = self._release_prefill(request)
        self._nodes.leave(request)
        request.ended = finish.reason
        return sends + self._end_if_told(request)

    # --- endings ----------------------------------------------------------------------------------------------

    def _end_if_told(self, request: Request) -> list[Send]:
        """The end of a request whose tokens are all out, once its nodes have said what they know of it."""
        return [] if request.ended is None or request.reporter is not None else self._end(request, request.ended, "")

    def _retry(self, request: Request, why: str) -> list[Send]:
        if request.emitted:
            return self._end(request, "error", f"{why} after {request.emitted} tokens", cause="unavailable")
        sends = self._leave(request)
        request.failures += 1
        if request.failures >= MAX_ATTEMPTS:
            failed = f"{why}, and {MAX_ATTEMPTS} attempts failed"
            return sends + self._end(request, "error", failed, cause="unavailable")
        request.times = RequestTimes(preemptions=request.times.preemptions)
        return sends + self._dispatch(request)

    def _no_node(self, request: Request, phase: Phase) -> list[Send]:
        which = "" if phase == "colocated" else f"{phase} "
        return self._end(request, "error", f"no {which}node is left", cause="unavailable")

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        detail: str,
        *,
        cause: FailureCause | None = None,
    ) -> list[Send]:
        if request.ended is not None:  # well, whatever came in between
            reason, detail, cause = request.ended, "", None
        sends = self._leave(request)
        self._requests.pop(request.request_id, None)
        self._ended.add(request.request_id)
        finished = Finished(
            request.request_id, reason, detail, request.prefill_name, request.decode_name, request.times, cause
        )
        return [*sends, Send(request.client, finished)]

    def _leave(self, request: Request) -> list[Send]:
        """Make every node that still serves the request forget it."""
        names = {node.name for node in (request.prefill, request.decode) if node is not None}
        self._nodes.leave(request)
        self._attempts.pop(request.attempt_id, None)
        request.reporter = None
        return [Send(name, Abort(request.attempt_id)) for name in sorted(names) if name in self._nodes]

    def _release_prefill(self, request: Request) -> list[Send]:
        """The decode node has the KV: the prefill node may free its blocks."""
        node = self._nodes.leave_prefill(request)
        return [Send(node.name, Release(request.attempt_id))] if node is not None else []

    def check_integrity(self) -> None:
        """Every node's load is what its requests add up to, and every request is known by its present attempt."""
        self._nodes.check_integrity(self._requests.values())
        assert self._attempts.keys() == {r.attempt_id for r in self._requests.values()}, "attempts out of step"

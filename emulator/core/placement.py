"""Where requests are: the nodes as the router sees them, what each has to do, and which of them takes the next one.

A node's load is counted from what it was given, not from what it says of itself, so it is known at once.

Nodes that prefill and decode could wait for each other for ever: the memory of one full of prompts for the other, and
the other way round. So at any one time a node either sends KV or takes it in. Queues keep the order in which requests
were dispatched; hence the first of those whose KV has still to move gets its memory at both ends, then the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from emulator.core.deployments import RoleSwitching, Routing
from emulator.core.messages import FinishReason, Heartbeat
from emulator.core.records import RequestTimes
from emulator.core.roles import Role

Phase = Literal["prefill", "decode", "colocated"]
_HELPERS: dict[Phase, Role] = {"prefill": "decode", "decode": "prefill"}

ATTEMPT = "~"
"""Stands between a request's id and the number of its attempt, and in no request's id."""


@dataclass(slots=True, eq=False)
class Node:
    """A node as the router sees it. Requests that it is `prefilling` wait there for their prefill or are in it.

    `sending` and `receiving` are requests whose KV is to leave here and to come here, `held_tokens` the prompts of the
    former; `kv_tokens` are for requests that decode here. `said` is what it last said of its load.
    """

    name: str
    role: Role
    capacity_tokens: int
    heard_s: float
    requests: int = 0
    prefilling: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0
    held_tokens: int = 0
    sending: int = 0
    receiving: int = 0
    said: Heartbeat | None = None

    @property
    def given_tokens(self) -> int:
        """Tokens whose KV is here or is to be."""
        return self.kv_tokens + self.held_tokens


def request_id_of(attempt_id: str) -> str:
    """The id by which a client knows what nodes call `attempt_id`."""
    return attempt_id.partition(ATTEMPT)[0]


@dataclass(slots=True, eq=False)
class Request:
    """A request in the cluster. `attempt_id` is what nodes call it; the nodes are None once they are done with it.

    `decode` is the node that generates its tokens, or all but the first: None also where it has not been chosen yet,
    and then `pledge` may be a node that takes its KV in if no other does. `moves`: its KV has still to get there.

    An attempt ends with a lost node (`failures` counts those) or because its tokens' KV is lost (`restarts`): the next
    one's prompt has the tokens that were generated, `resumed` of the `emitted` ones. Names and `times` are those of the
    first attempt that began to generate. Of these times the node `reporter` still owes some, which knows the request as
    `reported_id`; it may be done with the request already, and the request itself may have `ended`, but for being told.
    """

    request_id: str
    client: str
    prompt_tokens: int
    max_tokens: int
    submitted_s: float
    failures: int = 0
    restarts: int = 0
    resumed: int = 0
    attempt_id: str = ""
    prefill: Node | None = None
    decode: Node | None = None
    pledge: Node | None = None
    prefill_name: str | None = None
    decode_name: str | None = None
    moves: bool = False
    prefilling: bool = False
    emitted: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)
    reporter: Node | None = None
    reported_id: str = ""
    ended: FinishReason | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.max_tokens

    def begin_attempt(self) -> None:
        """Nodes are to know it by an id that they have not heard yet."""
        attempt = self.failures + self.restarts
        self.attempt_id = self.request_id + (f"{ATTEMPT}{attempt}" if attempt else "")

    def note(self, times: RequestTimes) -> None:
        """What a node knows of its life; of what is done again, the bytes alone."""
        if self.restarts:
            times = RequestTimes(kv_bytes_again=times.kv_bytes or 0)
        self.times = self.times.merged(times)

    def expect_report(self, node: Node) -> None:
        """A node has to say when it computed the prompt and handed it over, the first time that this is done."""
        if not self.restarts:
            self.reporter, self.reported_id = node, self.attempt_id

    def report(self, times: RequestTimes) -> None:
        """What that node says; it owes no more once it has said when all KV was ready."""
        self.times = self.times.merged(times)
        if self.times.prefill_end_s is not None and self.times.kv_ready_s is not None:
            self.reporter = None

    def restart(self, generated: int) -> None:
        """The present attempt, which is over, has `generated` tokens; the next one is to go on from them."""
        self.restarts += 1
        self.resumed += generated
        self.emitted = self.resumed
        self.prompt_tokens += generated
        self.max_tokens -= generated

    @property
    def nodes(self) -> tuple[Node | None, Node | None, Node | None]:
        """The nodes that it needs."""
        return self.prefill, self.decode, self.pledge


class Placement:
    """The nodes of a cluster and what each of them was given; `both_ways`: some may send KV and take it in."""

    def __init__(self, routing: Routing, role_switching: RoleSwitching | None = None) -> None:
        self._routing = routing
        self._switching = role_switching
        self._nodes: dict[str, Node] = {}
        self._own: dict[Phase, list[Node]] = {}
        self._helpers: dict[Phase, list[Node]] = {}
        self.both_ways = False
        self._turn: dict[Phase, int] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def get(self, name: str) -> Node | None:
        """The node of this name."""
        return self._nodes.get(name)

    def join(self, node: Node) -> None:
        """A node has introduced itself."""
        self._nodes[node.name] = node
        self._group()

    def lose(self, name: str) -> Node | None:
        """A node is gone: the node, None when there was none."""
        node = self._nodes.pop(name, None)
        self._group()
        return node

    def _group(self) -> None:
        nodes = list(self._nodes.values())
        self._own = {"colocated": [node for node in nodes if node.role == "colocated"]}
        for phase, helper in _HELPERS.items():
            self._own[phase] = [node for node in nodes if node.role in (phase, "mixed")]
            self._helpers[phase] = [node for node in nodes if node.role == helper] if self._switching else []
        self.both_ways = self._switching is not None or any(node.role == "mixed" for node in nodes)

    # --- choosing ---------------------------------------------------------------------------------------------

    def pick(self, phase: Phase, tokens: int) -> Node | None:
        """Round-robin, or the least loaded: prefill by queued prompt tokens, decode by free KV, else by requests.

        Nodes that can never hold `tokens` come into question only when none can, to refuse the request.
        """
        return self._choose(phase, self._candidates(phase, tokens), None)

    def pick_prefill(self, request: Request, tokens: int) -> Node | None:
        """The node to compute a prompt: one that may decode it too or from which KV can move, or failing these any.

        It has to hold `tokens` for that.
        """
        nodes = self._candidates("prefill", tokens)
        if self.both_ways:
            decodes = self._candidates("decode", request.total_tokens)
            reached = any(not node.sending for node in decodes)
            nodes = [n for n in nodes if n in decodes or (reached and not n.receiving)] or nodes
        return self._choose("prefill", nodes, None)

    def pick_decode(self, tokens: int, prefill: Node) -> Node | None:
        """The node to decode what is computed at `prefill`: it, another to which KV can move, or failing these any."""
        nodes = self._candidates("decode", tokens)
        if self.both_ways:
            nodes = [node for node in nodes if node is prefill or self.may_move(prefill, node)] or nodes
        return self._choose("decode", nodes, prefill)

    def pick_receiver(self, request: Request) -> Node | None:
        """The node to decode a request whose prompt is computed: another one than computed it."""
        sender = request.prefill
        assert sender is not None, "a prompt that was computed nowhere"
        nodes = self._candidates("decode", request.total_tokens)
        nodes = [node for node in nodes if self.may_move(sender, node)]
        return self._choose("decode", nodes, sender) or request.pledge

    def may_move(self, source: Node, destination: Node) -> bool:
        """Whether KV may go this way now: nodes that take KV in do not send any, and the other way round."""
        return source is not destination and not source.receiving and not destination.sending

    def _candidates(self, phase: Phase, tokens: int) -> list[Node]:
        """Nodes of the phase that can hold `tokens`, and those that help out where all these have too much to do."""
        own, helpers = self._own[phase], self._helpers.get(phase, [])
        nodes = [node for node in own if node.capacity_tokens >= tokens]
        if helpers and all(self._is_busy(phase, node, tokens) for node in nodes):
            nodes += [node for node in helpers if node.capacity_tokens >= tokens]
        return nodes or own or helpers

    def _is_busy(self, phase: Phase, node: Node, tokens: int) -> bool:
        assert self._switching is not None
        if phase == "prefill":
            return node.prefill_tokens > self._switching.max_queued_prompt_tokens
        return node.given_tokens + tokens > self._switching.max_kv_usage * node.capacity_tokens

    def _choose(self, phase: Phase, nodes: list[Node], prefill: Node | None) -> Node | None:
        if not nodes:
            return None
        if self._routing == "round_robin":
            turn = self._turn.get(phase, 0)
            self._turn[phase] = turn + 1
            return nodes[turn % len(nodes)]
        if phase == "colocated":
            return min(nodes, key=lambda n: (n.requests, n.prefill_tokens))
        if phase == "prefill":
            return min(nodes, key=lambda n: (n.prefill_tokens, n.role != phase, n.requests))
        if not self.both_ways:
            return min(nodes, key=lambda n: (n.kv_tokens - n.capacity_tokens, n.requests))
        return min(
            nodes, key=lambda n: (n.given_tokens - n.capacity_tokens, n is not prefill, n.role != phase, n.requests)
        )

    # --- load -------------------------------------------------------------------------------------------------

    def give_prefill(self, request: Request, node: Node) -> None:
        """A request's prompt is to be computed on a node, which sends its KV where that `moves`."""
        request.prefill, request.prefilling = node, True
        if not request.restarts:
            request.prefill_name = node.name
        node.prefilling += 1
        node.prefill_tokens += request.prompt_tokens
        if request.moves:
            node.sending += 1
            node.held_tokens += request.prompt_tokens
        if node is not request.decode:
            node.requests += 1

    def give_decode(self, request: Request, node: Node) -> None:
        """A request's tokens are to be generated on a node, which may be the one that computes its prompt."""
        self.pledge(request, None)
        request.decode = node
        if not request.restarts:
            request.decode_name = node.name
        node.kv_tokens += request.total_tokens
        node.receiving += request.moves
        if node is not request.prefill:
            node.requests += 1

    def pledge(self, request: Request, node: Node | None) -> None:
        """A node stays ready to take a request's KV in, as long as no other has been chosen."""
        if request.pledge is not None:
            request.pledge.receiving -= 1
        if node is not None:
            node.receiving += 1
        request.pledge = node

    def prefilled(self, request: Request) -> None:
        """A request's prompt is computed, or will not be any more."""
        if request.prefilling and request.prefill is not None:
            request.prefill.prefilling -= 1
            request.prefill.prefill_tokens -= request.prompt_tokens
        request.prefilling = False

    def leave_prefill(self, request: Request) -> Node | None:
        """The node that computed a request's prompt is done with it: that node, None when it goes on to decode."""
        node = request.prefill
        if node is None or node is request.decode:
            return None
        self.prefilled(request)
        self.pledge(request, None)
        if request.moves:
            node.sending -= 1
            node.held_tokens -= request.prompt_tokens
            if request.decode is not None:
                request.decode.receiving -= 1
        request.prefill, request.moves = None, False
        node.requests -= 1
        return node

    def leave(self, request: Request) -> None:
        """A request is no node's any more."""
        self.leave_prefill(request)
        self.prefilled(request)
        node = request.decode
        if node is not None:
            node.requests -= 1
            node.kv_tokens -= request.total_tokens
        request.prefill = request.decode = None

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """The load that is kept of each node equals what its requests add up to, and none sends while it receives."""
        everyone = list(requests)
        for node in self._nodes.values():
            here = [r for r in everyone if node in (r.prefill, r.decode)]
            assert node.requests == len(here), "a node's request count is off"
            prefilling = [r.prompt_tokens for r in here if r.prefill is node and r.prefilling]
            assert node.prefill_tokens == sum(prefilling), "a node's prefill load is off"
            assert node.prefilling == len(prefilling), "a node's prefill queue is off"
            kv = sum(r.total_tokens for r in here if r.decode is node)
            assert node.kv_tokens == kv, "a node's KV load is off"
            sending = [r.prompt_tokens for r in here if r.prefill is node and r.moves]
            assert node.held_tokens == sum(sending), "the KV that a node holds is off"
            assert node.sending == len(sending), "a node's count of KV to send is off"
            receiving = sum(r.moves and node in (r.decode, r.pledge) for r in everyone)
            assert node.receiving == receiving, "a node's count of KV to take in is off"
            assert not (node.sending and node.receiving), "a node sends KV while it takes KV in"

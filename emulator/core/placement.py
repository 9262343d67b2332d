"""Where requests are: the nodes as the router sees them, what each has to do, and which of them takes the next one.

A node's load is counted from what it was given, not from what it says of itself, so it is known at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from emulator.core.records import RequestTimes
from emulator.core.specs import Role, Routing

ATTEMPT = "~"
"""Stands between a request's id and the number of its attempt, and in no request's id."""


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


def request_id_of(attempt_id: str) -> str:
    """The id by which a client knows what nodes call `attempt_id`."""
    return attempt_id.partition(ATTEMPT)[0]


@dataclass(slots=True, eq=False)
class Request:
    """A request in the cluster. `attempt_id` is what nodes call it; the nodes are None once they are done with it.

    `decode` is the node that generates its tokens, or all but the first: None also where it has not been chosen yet.

    An attempt ends with a lost node (`failures` counts those) or because its tokens' KV is lost (`restarts`): the next
    one's prompt has the tokens that were generated, `resumed` of the `emitted` ones. Names and `times` are those of the
    first attempt that began to generate.
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
    prefill_name: str | None = None
    decode_name: str | None = None
    prefilling: bool = False
    emitted: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)

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

    def restart(self, generated: int) -> None:
        """The present attempt, which is over, has `generated` tokens; the next one is to go on from them."""
        self.restarts += 1
        self.resumed += generated
        self.emitted = self.resumed
        self.prompt_tokens += generated
        self.max_tokens -= generated


_LOAD: Mapping[Role, Callable[[Node], tuple[int, int]]] = {
    "prefill": lambda node: (node.prefill_tokens, node.requests),
    "decode": lambda node: (node.kv_tokens - node.capacity_tokens, node.requests),
    "colocated": lambda node: (node.requests, node.prefill_tokens),
}


class Placement:
    """The nodes of a cluster and what each of them was given."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._nodes: dict[str, Node] = {}
        self._by_role: dict[Role, list[Node]] = {}
        self._turn: dict[Role, int] = {}

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
        self._by_role = {}
        for node in self._nodes.values():
            self._by_role.setdefault(node.role, []).append(node)

    # --- choosing ---------------------------------------------------------------------------------------------

    def pick(self, role: Role, tokens: int) -> Node | None:
        """Round-robin, or the least loaded: prefill by queued prompt tokens, decode by free KV, else by requests.

        Nodes that can never hold `tokens` come into question only when none can, to refuse the request.
        """
        nodes = self._by_role.get(role, [])
        nodes = [node for node in nodes if node.capacity_tokens >= tokens] or nodes
        if not nodes:
            return None
        if self._routing == "round_robin":
            turn = self._turn.get(role, 0)
            self._turn[role] = turn + 1
            return nodes[turn % len(nodes)]
        return min(nodes, key=_LOAD[role])

    # --- load -------------------------------------------------------------------------------------------------

    def give_prefill(self, request: Request, node: Node) -> None:
        """A request's prompt is to be computed on a node."""
        request.prefill, request.prefilling = node, True
        if not request.restarts:
            request.prefill_name = node.name
        node.prefill_tokens += request.prompt_tokens
        if node is not request.decode:
            node.requests += 1

    def give_decode(self, request: Request, node: Node) -> None:
        """A request's tokens are to be generated on a node, which may be the one that computes its prompt."""
        request.decode = node
        if not request.restarts:
            request.decode_name = node.name
        node.kv_tokens += request.total_tokens
        if node is not request.prefill:
            node.requests += 1

    def prefilled(self, request: Request) -> None:
        """A request's prompt is computed, or will not be any more."""
        if request.prefilling and request.prefill is not None:
            request.prefill.prefill_tokens -= request.prompt_tokens
        request.prefilling = False

    def leave_prefill(self, request: Request) -> Node | None:
        """The node that computed a request's prompt is done with it: that node, None when it goes on to decode."""
        node = request.prefill
        if node is None or node is request.decode:
            return None
        self.prefilled(request)
        request.prefill = None
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
        """The load that is kept of each node equals what its requests add up to."""
        everyone = list(requests)
        for node in self._nodes.values():
            here = [r for r in everyone if node in (r.prefill, r.decode)]
            assert node.requests == len(here), "a node's request count is off"
            prefilling = sum(r.prompt_tokens for r in here if r.prefill is node and r.prefilling)
            assert node.prefill_tokens == prefilling, "a node's prefill load is off"
            kv = sum(r.total_tokens for r in here if r.decode is node)
            assert node.kv_tokens == kv, "a node's KV load is off"

"""Every control message, one section per receiver. `core.message_codec` puts them on the wire.

The router stands in the middle: clients and nodes speak to it alone, so a ticket, a token or an abort takes at most
two hops and every node needs one connection. Bulk KV never travels here.

  client → router   Submit, Abort, ReadLoad
  router → prefill  Prefill, Admit, Generate, SendKv, Release, Abort, Forget, SendProbe
  router → decode   Reserve, KvComputed, Generate, Abort, Forget, OpenProbe
  router → coloc.   Generate, Abort, Forget
  node → router     Hello, PrefillDone, KvReady, Reserved, ReadKv, KvReceived, StepTokens, Preempted, Rejected,
                    Heartbeat, Report, ProbeOpened, ProbeDone
  all → router      ReadClock
  router → client   Tokens, Finished, Assembled, ClusterLoad, NodeLost, NodeBack, Report
  router → all      Welcome, ClockReading, Begin, EndRecord, Stop

A run: every peer says Hello and compares its clock with the router's; once all nodes are there, the router has each
pair's link probed, and the client hears Assembled and begins; when its load has ended it says Stop, and every process
sends its Report through the router to the client before it leaves. Of one that serves without an end, the router says
EndRecord when enough is recorded.

There may be several clients. The first Begin is the run's, and a client that joins later hears in Assembled when that
was; tokens go to whoever submitted the request.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from emulator.core.deployments import FirstToken
from emulator.core.records import RequestTimes

FinishReason = Literal["length", "stop", "aborted", "error"]
FailureCause = Literal["impossible", "unavailable", "timeout"]
"""Why a request failed: the cluster can never serve such a one, lost a node or has none, or took too long."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True):
    """Base of all control messages."""


# --- to the router, from clients ------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """A request: a prompt of `prompt_tokens`, at most `max_tokens` to generate."""

    request_id: str
    prompt_tokens: int
    max_tokens: int


class Abort(Message, frozen=True):
    """The request is not wanted any more; everything that it holds is to be freed."""

    request_id: str


class ReadLoad(Message, frozen=True):
    """What do the nodes have to do?"""


# --- to nodes, from the router --------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    """To a node that is to serve this request all by itself: compute the prompt, and decode."""

    request_id: str
    prompt_tokens: int
    max_tokens: int


class Prefill(Message, frozen=True):
    """To a prefill node: compute this prompt (with `await_ticket` once it is admitted or its ticket has come), keep its
    KV, send it when a ticket comes."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    await_ticket: bool = False


class Reserve(Message, frozen=True):
    """To a decode node: reserve KV blocks for this request and issue a ticket for its transfer from node `source`.

    `computed`: its KV is there to be read already (see `KvComputed`). Its first token is then streamed when the KV has
    arrived (`handoff`), has been streamed by then (`prefill`), or is made here by computing the last token of the
    prompt again (`recompute`).
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    first_token: FirstToken = "handoff"
    computed: bool = False
    source: str = ""


class Admit(Message, frozen=True):
    """To a prefill node: the decode node has memory for this request, so its prefill may start."""

    request_id: str


class KvComputed(Message, frozen=True):
    """To a decode node that reads KV itself: that of this request is there to be read."""

    request_id: str


class SendKv(Message, frozen=True):
    """To a prefill node: this ticket is good at `endpoint`, which is that of node `destination`; send the KV there.

    Where the decode node reads, it has been waiting for a place on the link since `readable_s`.
    """

    request_id: str
    ticket: int
    endpoint: str
    destination: str = ""
    readable_s: float | None = None


class Forget(Message, frozen=True):
    """To a node that was given up and is itself again: drop all requests, which went to others or have failed."""


class OpenProbe(Message, frozen=True):
    """To a decode node, before a run: take in `pings` transfers of one byte, then one of `nbytes`."""

    pings: int
    nbytes: int


class SendProbe(Message, frozen=True):
    """To a prefill node, before a run: send a byte under each ticket but the last, one by one, then `nbytes`."""

    endpoint: str
    tickets: tuple[int, ...]
    nbytes: int


class Release(Message, frozen=True):
    """To a prefill node: the KV has arrived, its blocks are free."""

    request_id: str


# --- to the router, from nodes --------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of every peer. `secret` is the run's; a peer without it is ignored and counted."""

    name: str
    role: Literal["prefill", "decode", "colocated", "mixed", "client"]
    secret: str
    kv_blocks: int = 0


class ReadClock(Message, frozen=True):
    """What is the router's clock? Asked at `sent_s` of the peer's own."""

    sent_s: float


class PrefillDone(Message, frozen=True):
    """A prompt has been computed, and its first token with it."""

    request_id: str
    times: RequestTimes


class KvReady(Message, frozen=True):
    """The last KV of a request has been handed to the link (when that was later than its prefill's end)."""

    request_id: str
    times: RequestTimes


class Reserved(Message, frozen=True):
    """Blocks are reserved: KV may be sent to `endpoint` under `ticket`."""

    request_id: str
    ticket: int
    endpoint: str


class ReadKv(Message, frozen=True):
    """The decode node wants this request's KV, to be read since `readable_s`, at `endpoint` under `ticket`."""

    request_id: str
    ticket: int
    endpoint: str
    readable_s: float


class Preempted(Message, frozen=True):
    """The node that decodes a request has taken its memory away, when `generated` tokens of this attempt were there.

    It has given the request up, and says what it knows of it; or computes it again by itself (`recomputes`).
    """

    request_id: str
    generated: int
    times: RequestTimes = RequestTimes()
    recomputes: bool = False


class KvReceived(Message, frozen=True):
    """All KV of the request is at the decode node."""

    request_id: str
    times: RequestTimes


class ProbeOpened(Message, frozen=True):
    """A probe may be sent to `endpoint` under `tickets`."""

    endpoint: str
    tickets: tuple[int, ...]


class ProbeDone(Message, frozen=True):
    """What a probe showed, wall seconds: how long its bytes took, and each ping from sending to arrival."""

    seconds: float
    ping_s: tuple[float, ...]


class TokenCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`n` new tokens of a request."""

    request_id: str
    n: int


class NodeFinish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request has ended at a node that generated its tokens."""

    request_id: str
    reason: FinishReason
    times: RequestTimes = RequestTimes()


class StepTokens(Message, frozen=True):
    """All tokens of one step (or of one handoff), and the requests that ended with it."""

    tokens: tuple[TokenCount, ...]
    finished: tuple[NodeFinish, ...] = ()


class Rejected(Message, frozen=True):
    """The node can never serve this request, or has given it up."""

    request_id: str
    reason: str
    cause: FailureCause = "impossible"


class Heartbeat(Message, frozen=True):
    """The node is alive; its load, for routing."""

    kv_blocks_free: int
    running: int
    waiting: int


# --- to clients, from the router ------------------------------------------------------------------------------


class Tokens(Message, frozen=True):
    """New tokens of this client's requests."""

    tokens: tuple[TokenCount, ...]


class Finished(Message, frozen=True):
    """A request has ended; `cause` and `detail` say why when it failed."""

    request_id: str
    reason: FinishReason
    detail: str = ""
    prefill_node: str | None = None
    decode_node: str | None = None
    times: RequestTimes = RequestTimes()
    cause: FailureCause | None = None


class NodeLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node last said of itself."""

    name: str
    load: Heartbeat


class ClusterLoad(Message, frozen=True):
    """The load of every node that is there and has said something of it."""

    nodes: tuple[NodeLoad, ...]


class NodeLost(Message, frozen=True):
    """A node is gone, or silent; its requests went to others or have failed."""

    name: str


class NodeBack(Message, frozen=True):
    """A node that was lost for its silence speaks again, and serves again."""

    name: str


class LinkProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the probe of one pair's link showed: wall seconds that `nbytes` took, and its pings."""

    source: str
    destination: str
    nbytes: int
    seconds: float
    ping_s: tuple[float, ...]


class Assembled(Message, frozen=True):
    """All nodes of the run have joined and their links were probed; it can begin, or has begun at `t0_s`.

    The rest is for a client that has not planned the run: what it is, and the `problem` of a link that is not what was
    asked for, unless the run is forced.
    """

    probes: tuple[LinkProbe, ...] = ()
    t0_s: float | None = None
    label: str = ""
    model: str = ""
    scale_time: float = 1.0
    problem: str = ""


class Report(Message, frozen=True):
    """A piece of what process `name` recorded, JSON when put together; `last` ends it."""

    name: str
    data: bytes
    last: bool


# --- to everyone, from the router -----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The router knows this peer: its answer to Hello, and to every Heartbeat, which keeps a node's leases alive."""


class ClockReading(Message, frozen=True):
    """The router's clock stood at `router_s` when the question that was sent at `sent_s` came."""

    sent_s: float
    router_s: float


class Begin(Message, frozen=True):
    """The run starts: model time 0 is at `t0_s` of the router's monotonic clock. Only the first one counts."""

    t0_s: float


class EndRecord(Message, frozen=True):
    """What is recorded of the run ends here; the cluster goes on serving.

    Of all that a client has sent, its first `requests` are in the record.
    """

    requests: int = 0


class Stop(Message, frozen=True):
    """The run is over: report what was recorded and leave."""


ToRouter = (
    Hello
    | ReadClock
    | Submit
    | Abort
    | ReadLoad
    | PrefillDone
    | KvReady
    | Reserved
    | ReadKv
    | Preempted
    | KvReceived
    | StepTokens
    | Rejected
    | Heartbeat
    | Begin
    | Stop
    | Report
    | ProbeOpened
    | ProbeDone
)
ToPeer = Welcome | ClockReading | Begin | EndRecord | Stop
ToNode = (
    ToPeer
    | Generate
    | Prefill
    | Admit
    | Reserve
    | KvComputed
    | SendKv
    | Release
    | Abort
    | Forget
    | OpenProbe
    | SendProbe
)
ToClient = ToPeer | Tokens | Finished | Assembled | ClusterLoad | NodeLost | NodeBack | Report

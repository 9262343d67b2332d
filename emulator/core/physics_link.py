"""What no KV network can do: bytes that come faster than a NIC carries them, before they were made, or too few.

Over any window of time the transfers that lie wholly in it fit through each NIC that they use. That holds exactly when
the NIC could serve them one piece at a time, the one that has to be there first always first, without being late for
any (the processor demand criterion: Baruah, Rosier and Howell, 1990), which one pass over a heap decides.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from emulator.core.records import Record, expand_times
from emulator.core.run_spec import LinkSpec, RunSpec
from emulator.core.shaping import Bucket


@dataclass(frozen=True, slots=True)
class Allowance:
    """What measurements may be off: a share of a rate, token buckets sent for free, and seconds between clocks.

    And bytes on the wire that queue, past the NIC, for a receiver that wakes late: it counts them at once.
    """

    rate_share: float
    bursts: int
    time_s: float
    queued_bytes: int = 0

    def free_s(self, bps: float, scale_bytes: float) -> float:
        """Seconds of a NIC of `bps` that a window may be short of."""
        free_bytes = self.bursts * Bucket.of(bps).burst_bytes + self.queued_bytes * scale_bytes
        return self.time_s + free_bytes * 8 / bps


class Span(NamedTuple):
    """A transfer at one NIC: when its first byte could pass, when its last had passed, and the seconds it takes."""

    start_s: float
    end_s: float
    work_s: float
    name: str


def link_violations(run: RunSpec, records: Sequence[Record], allowed: Allowance, *, rates_hold: bool) -> list[str]:
    """A sentence for each law that the run's transfers break, with its first case."""
    link = run.link
    if link is None:
        stray = [record.request_id for record in records if record.kv_bytes or record.kv_end_s is not None]
        return [f"KV crossed a network that the run does not have: {stray[0]}"] if stray else []
    sizes, times = _sizes(run, records), _times(run, records, allowed)
    rates = _rates(run, link, records, allowed) if rates_hold else []
    return sizes[:1] + times[:1] + rates


def prefilled_anew(run: RunSpec, record: Record) -> bool:
    """Whether a request that lost its memory was prefilled anew for that, instead of being recomputed where it was."""
    return record.preemptions > 0 and record.kv_bytes > 0 and run.router.preemption == "prefill"


def _sizes(run: RunSpec, records: Iterable[Record]) -> list[str]:
    """Whoever completed brought the KV of the whole prompt and of nothing else; or none, if one node did it all.

    And that of the prompt with what was generated, for each time that it was prefilled anew.
    """
    per_token = {node.name: node.kv_bytes_per_token for node in run.nodes}
    found = []
    for r in records:
        moved_tokens = 0 if r.decode_node == r.prefill_node else r.prompt_tokens
        if r.outcome == "completed" and r.kv_bytes != per_token.get(r.decode_node or "", 0) * moved_tokens:
            brought = f"{r.request_id} brought {r.kv_bytes} bytes for a prompt of {r.prompt_tokens} tokens"
            found.append(f"KV is not conserved: {brought}")
        elif r.outcome == "completed" and not _may_move_again(run, r, per_token.get(r.decode_node or "", 0)):
            again = f"{r.request_id}, preempted {r.preemptions} times, brought {r.kv_bytes_again} bytes again"
            found.append(f"KV is not conserved: {again}")
    return found


def _may_move_again(run: RunSpec, record: Record, per_token: int) -> bool:
    """Whether so many bytes may have been moved again: every time a prompt that is longer by a token at least.

    The last time there may be none, where the prefill node streams a token that is all that is left, and at any time
    where a node may do all by itself.
    """
    if not prefilled_anew(run, record):
        return record.kv_bytes_again == 0
    tokens, odd = divmod(record.kv_bytes_again, per_token)
    times = record.preemptions
    fewest = 0 if run.serves_alone else times - (run.first_token == "prefill")
    longest = record.prompt_tokens + record.output_tokens - 1
    return odd == 0 and any(
        n * record.prompt_tokens + n * (n + 1) // 2 <= tokens <= n * longest - n * (n - 1) // 2
        for n in range(fewest, times + 1)
    )


def _times(run: RunSpec, records: Iterable[Record], allowed: Allowance) -> list[str]:
    """No KV before it is computed and its message's cost is spent, no token of a decode node before its KV."""
    whole = {node.name for node in run.nodes if node.overlap == "none"}
    costs = {pair: run.message_cost(*pair) for pair in run.kv_pairs}
    first, which = (1, "second") if run.first_token == "prefill" else (0, "first")
    found = []
    for r in records:
        if r.kv_start_s is None or r.kv_end_s is None:
            continue
        made_s = r.prefill_end_s if r.prefill_node in whole else r.prefill_start_s
        if made_s is not None and r.kv_start_s < made_s - allowed.time_s:
            found.append(f"KV was sent before it was computed: that of {r.request_id}, {made_s - r.kv_start_s:g} s")
            continue
        cost = costs.get((r.prefill_node or "", r.decode_node or "")) if r.prefill_node in whole else None
        if cost is not None and r.kv_ready_s is not None:
            paid_s = r.kv_ready_s + cost.seconds(r.kv_bytes)
            if r.kv_start_s < paid_s - allowed.time_s:
                early_s = paid_s - r.kv_start_s
                found.append(f"KV was sent before its message's cost was spent: that of {r.request_id}, {early_s:g} s")
                continue
        token_s = _token_s(r, first)
        if token_s is not None and token_s < r.kv_end_s - allowed.time_s:
            early_s = r.kv_end_s - token_s
            found.append(f"a token came before its KV: the {which} of {r.request_id}, {early_s:g} s")
    return found


def _token_s(record: Record, index: int) -> float | None:
    """When a request's first (0) or second (1) token came, without writing all out; None for none."""
    if index == 0:
        return record.first_token_s
    times = expand_times(record.token_times_s[:2])
    return float(times[1]) if times.size > 1 else None


def _rates(run: RunSpec, link: LinkSpec, records: Iterable[Record], allowed: Allowance) -> list[str]:
    """Neither one transfer alone nor all through one NIC are faster than it."""
    nics = {node.name: link.nic(node.name) for node in run.nodes}
    every = {bps for nic in nics.values() for bps in (nic.egress_bps, nic.ingress_bps)}
    slack_s = {bps: allowed.free_s(bps, run.scale.bytes) for bps in every}
    sent: defaultdict[str, list[Span]] = defaultdict(list)
    taken: defaultdict[str, list[Span]] = defaultdict(list)
    found: list[str] = []
    for r in records:
        source, destination, start_s = r.prefill_node or "", r.decode_node or "", r.kv_start_s
        if start_s is None or r.kv_end_s is None or source not in nics or destination not in nics:
            continue
        bits = 8 * r.kv_bytes / (1 + allowed.rate_share)
        end_s = r.kv_end_s - link.delay_s + link.jitter_s
        egress_bps, ingress_bps = nics[source].egress_bps, nics[destination].ingress_bps
        bps = min(egress_bps, ingress_bps)
        if not found and bits / bps > end_s - start_s + slack_s[bps]:
            found.append(
                f"a transfer was faster than its link: {r.request_id} brought {r.kv_bytes} bytes from {source} to "
                f"{destination} in {r.kv_end_s - start_s:g} s"
            )
        sent[source].append(Span(start_s, end_s, bits / egress_bps, r.request_id))
        taken[destination].append(Span(start_s, end_s, bits / ingress_bps, r.request_id))
    full = [(name, "sent", first_late(spans, slack_s[nics[name].egress_bps])) for name, spans in sent.items()]
    full += [(name, "took in", first_late(spans, slack_s[nics[name].ingress_bps])) for name, spans in taken.items()]
    return found + [
        f"{name} {what} more KV than its NIC carries until the transfer of {late} ends"
        for name, what, late in full
        if late is not None
    ]


def first_late(spans: Iterable[Span], slack_s: float = 0.0) -> str | None:
    """The transfer with whose end a window closes that holds more than fits, by more than `slack_s`; None for none."""
    ready: list[tuple[float, str, float]] = []
    now_s = -math.inf
    for span in [*sorted(spans), Span(math.inf, math.inf, 0.0, "")]:
        while ready and now_s < span.start_s:
            end_s, name, left_s = ready[0]
            if now_s + left_s > span.start_s:
                heapq.heapreplace(ready, (end_s, name, left_s - (span.start_s - now_s)))
                break
            heapq.heappop(ready)
            now_s += left_s
            if now_s > end_s + slack_s:
                return name
        now_s = max(now_s, span.start_s)
        heapq.heappush(ready, (span.end_s, span.name, span.work_s))
    return None

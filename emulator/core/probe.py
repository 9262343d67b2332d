"""Proving the KV links before a run: each pair that KV may cross sends bytes and pings, and must be what was asked for.

Pairs go one after the other, so that each is measured alone. What is measured is held against the payload rate and the
delay of the topology. A probe is short, and one hiccup of the machine spoils it, so a pair may try three times; one
that stays outside the tolerance names the likely cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from emulator.core.messages import LinkProbe, Message, OpenProbe, ProbeDone, ProbeOpened, SendProbe
from emulator.core.run_spec import RunSpec
from emulator.core.scaling import Scaling

MIN_BYTES, MAX_BYTES = 20_000_000, 50_000_000
TARGET_S = 0.2
LONGEST_S = 2.0
PINGS = 7
ATTEMPTS = 3
RATE_TOLERANCE = 0.03
DELAY_TOLERANCE_S = 2e-4


def probe_bytes(wire_bytes_per_s: float) -> int:
    """Bytes on the wire of one pair's probe: 0.2 s of link time, from 20 to 50 MB, but never more than 2 s of it."""
    wanted = min(MAX_BYTES, max(MIN_BYTES, wire_bytes_per_s * TARGET_S))
    return max(1, int(min(wanted, wire_bytes_per_s * LONGEST_S)))


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one pair showed, in model terms: payload rate in bits per second, one-way delay in seconds.

    `took_s` is what the bytes took, `jitter_s` by how much each delay may be off by intention.
    """

    source: str
    destination: str
    asked_bps: float
    achieved_bps: float
    asked_delay_s: float
    delay_s: float
    took_s: float = math.inf
    jitter_s: float = 0.0

    @classmethod
    def of(cls, seen: LinkProbe, run: RunSpec) -> Probe:
        """What a run's router was told, in the run's model terms; of the pings the quickest counts."""
        assert run.link is not None, "a probe without a link"
        scaling = Scaling(run.scale)
        model_bits = seen.nbytes * 8 * scaling.bytes
        took_s = seen.seconds / scaling.time
        return cls(
            source=seen.source,
            destination=seen.destination,
            asked_bps=run.link.pair_bps(seen.source, seen.destination),
            achieved_bps=model_bits / took_s,
            asked_delay_s=run.link.delay_s,
            delay_s=min(seen.ping_s, default=0.0) / scaling.time,
            took_s=took_s,
            jitter_s=run.link.jitter_s,
        )

    def problem(self) -> str | None:
        """Why this pair is not what was asked for, with the likely cause; None when it is."""
        pair = f"{self.source} → {self.destination}"
        ratio = self.achieved_bps / self.asked_bps
        if abs(ratio - 1) > RATE_TOLERANCE + self.jitter_s / self.took_s:
            cause = (
                "the link is not shaped where the KV goes: wrong interface, or no permission to shape"
                if ratio > 1
                else "this machine does not carry the rate (CPU bound: try scale.time), or the congestion control is "
                "not cubic (BBR misbehaves behind a token bucket)"
            )
            return (
                f"{pair} carried {self.achieved_bps / 1e9:.3f} Gbps of payload where {self.asked_bps / 1e9:.3f} Gbps "
                f"were asked for ({ratio - 1:+.1%}); likely cause: {cause}"
            )
        slack_s = DELAY_TOLERANCE_S + RATE_TOLERANCE * self.asked_delay_s + self.jitter_s
        if self.asked_delay_s and not -self.jitter_s <= self.delay_s - self.asked_delay_s <= slack_s:
            return (
                f"{pair} has a one-way delay of {self.delay_s * 1e3:.3f} ms where {self.asked_delay_s * 1e3:.3f} ms "
                "was asked for; likely cause: a busy machine (try scale.time)"
            )
        return None


@dataclass(frozen=True, slots=True)
class ProbeSend:
    """Send this message to that node."""

    node: str
    message: Message


@dataclass(slots=True)
class Prober:
    """The probes of a run as a state machine: `start`, then `handle` each answer until `finished`."""

    run: RunSpec
    pairs: Sequence[tuple[str, str]] = ()
    done: list[LinkProbe] = field(default_factory=list)
    attempts: int = 0

    @classmethod
    def of(cls, run: RunSpec) -> Prober:
        """For every pair of a run that KV may cross; none when no KV crosses a network."""
        return cls(run, run.kv_pairs if run.link is not None else ())

    @property
    def finished(self) -> bool:
        """Whether every pair has been measured."""
        return len(self.done) == len(self.pairs)

    def start(self) -> list[ProbeSend]:
        """Ask the first pair's receiver to take a probe in."""
        return self._open()

    def handle(self, message: ProbeOpened | ProbeDone) -> list[ProbeSend]:
        """An answer of the pair that is being measured."""
        if self.finished:
            return []
        source, destination = self.pairs[len(self.done)]
        if isinstance(message, ProbeOpened):
            return [ProbeSend(source, SendProbe(message.endpoint, message.tickets, self.nbytes(source, destination)))]
        seen = LinkProbe(source, destination, self.nbytes(source, destination), message.seconds, message.ping_s)
        self.attempts += 1
        if self.attempts >= ATTEMPTS or Probe.of(seen, self.run).problem() is None:
            self.done.append(seen)
            self.attempts = 0
        return self._open()

    def _open(self) -> list[ProbeSend]:
        if self.finished:
            return []
        source, destination = self.pairs[len(self.done)]
        return [ProbeSend(destination, OpenProbe(PINGS, self.nbytes(source, destination)))]

    def nbytes(self, source: str, destination: str) -> int:
        """Bytes on the wire that a pair is measured with."""
        assert self.run.link is not None, "a probe without a link"
        return probe_bytes(Scaling(self.run.scale).wall_bytes_per_s(self.run.link.pair_bps(source, destination)))

"""A node's end of the KV network in model terms: scales rates, sizes and times, keeps what each transfer took."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from emulator.core.effects import CancelTransmit, CloseTicket, OpenTicket, Transmit
from emulator.core.errors import ConfigError
from emulator.core.messages import OpenProbe, ProbeDone, ProbeOpened, SendProbe
from emulator.core.run_spec import NodeSpec
from emulator.core.scaling import Scaling
from emulator.live.backend import KvStore
from emulator.live.clock import ModelClock
from emulator.live.kv_frames import Arrival
from emulator.live.kv_places import KvSink, KvSource, StoredSink, StoredSource
from emulator.live.kv_receiver import KvReceiver
from emulator.live.kv_sender import KvSender
from emulator.live.nic import EmulatedNic
from emulator.live.reports import KvReport, TransferRow
from emulator.live.status import Assignment

PING_GAP_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTraffic:
    """What has gone through one end of the KV network up to now, without probes; model bytes.

    `waiting_transfers` are those that have not sent a byte so far.
    """

    sent_bytes: float = 0.0
    waiting_bytes: float = 0.0
    waiting_transfers: int = 0
    received_bytes: float = 0.0
    broken_off: int = 0
    dropped_frames: Mapping[str, int] = field(default_factory=dict)


class KvEnd:
    """Sender, receiver or both, by what the node may do; neither where no KV crosses a network, so without `nic`.

    `arrived(ticket, nbytes, start_s, end_s)` is called on the loop with model bytes and model seconds, `probed` when
    a probe is complete. `begun`, which may be set, is told how many wall seconds each transfer has waited to be sent,
    on a thread of the link. KV is taken from the blocks of `store` and put there; without it random bytes stand for KV.
    """

    def __init__(
        self,
        task: Assignment,
        node: NodeSpec,
        nic: EmulatedNic | None,
        clock: ModelClock,
        *,
        arrived: Callable[[int, int, float, float], None],
        probed: Callable[[ProbeDone], None],
        failed: Callable[[Exception], None],
        store: KvStore | None = None,
    ) -> None:
        run = task.run
        self._run = run
        self._node = node
        self._clock = clock
        self._scaling = Scaling(run.scale)
        self._arrived = arrived
        self._probed = probed
        self.begun: Callable[[float], None] | None = None
        self._probe: list[int] = []
        self._probe_sent: set[int] = set()
        self._probe_seen: list[Arrival] = []
        self._probe_bytes = self._probe_sent_bytes = 0
        self._failed = failed
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._expected: dict[int, OpenTicket] = {}
        self._transfers: list[TransferRow] = []
        self._recorded: KvReport | None = None
        self._sender: KvSender | None = None
        self._receiver: KvReceiver | None = None
        self._nic = nic
        if nic is None or run.link is None:
            return
        if node.name in run.kv_senders:
            self._sender = KvSender(
                egress_bytes_per_s=nic.egress_bytes_per_s,
                frame_bytes=nic.frame_bytes,
                shaped_elsewhere=nic.shaped_by_kernel,
                max_in_flight=run.link.max_in_flight,
                order=run.link.order,
                verify=run.verify_kv,
                on_begin=self._begun,
                on_error=self._link_failed,
            )
        if node.name in run.kv_receivers:
            self._receiver = KvReceiver(
                f"tcp://{task.kv_address}:*",
                ingress_bytes_per_s=nic.ingress_bytes_per_s,
                frame_bytes=nic.frame_bytes,
                shaped_elsewhere=nic.shaped_by_kernel,
                delay_s=nic.hold_s,
                jitter_s=nic.hold_jitter_s,
                seed=run.seed,
                host_memory_bytes=task.host_memory_bytes if store is None else sys.maxsize,  # it has a limit itself
                verify=run.verify_kv,
                on_complete=self._complete,
                on_error=self._link_failed,
            )

    @property
    def endpoint(self) -> str:
        """Where KV for this node goes; empty when it takes none."""
        return self._receiver.endpoint if self._receiver is not None else ""

    def compare_clocks(self) -> None:
        """The clock has been compared with the router's: stamps on the wire are instants of that one.

        Raises ConfigError where the receiver would have to hold frames for a delay that two clocks measure.
        """
        offset_s = self._clock.offset.seconds
        if self._nic is not None and self._nic.hold_s and not self._nic.shaped_by_kernel and offset_s:
            raise ConfigError(
                f"{self._node.name}: a delay cannot be emulated between hosts without the kernel's help, since two "
                "clocks would measure it; use --shaping kernel, or leave kv_network.delay out"
            )
        if self._sender is not None:
            self._sender.clock_offset_s = offset_s
        if self._receiver is not None:
            self._receiver.clock_offset_s = offset_s

    def transmit(self, effect: Transmit) -> None:
        """Hand one message of a transfer to the link."""
        assert self._sender is not None
        assert self._run.link is not None
        nbytes = self._scaling.wire_bytes(effect.offset, effect.nbytes, effect.total)
        if nbytes:
            pair = (self._node.name, effect.destination)
            self._sender.send(
                effect.endpoint,
                effect.ticket,
                nbytes,
                message_s=self._scaling.wall_s(self._run.message_s(*pair, effect.nbytes)),
                pair_bytes_per_s=self._scaling.wall_bytes_per_s(self._run.link.pair_bps(*pair)),
                source=self._source(effect),
            )

    def cancel(self, effect: CancelTransmit) -> None:
        """Forget what has not left."""
        assert self._sender is not None
        self._sender.cancel(effect.ticket)

    def open(self, effect: OpenTicket) -> None:
        """Let a transfer in."""
        assert self._receiver is not None
        self._expected[effect.ticket] = effect
        nbytes = self._scaling.wire_bytes(0, effect.nbytes, effect.nbytes)
        self._receiver.open(effect.ticket, nbytes, self._sink(effect, nbytes))

    def shut(self, effect: CloseTicket) -> None:
        """End a ticket and drop what it brought."""
        assert self._receiver is not None
        self._expected.pop(effect.ticket, None)
        self._receiver.release(effect.ticket)

    def open_probe(self, probe: OpenProbe) -> ProbeOpened:
        """Let a probe in: a ticket for each ping and one for its bytes."""
        assert self._receiver is not None
        self._probe = [secrets.randbits(63) for _ in range(probe.pings + 1)]
        self._probe_seen = []
        for ticket in self._probe[:-1]:
            self._receiver.open(ticket, 1)
        self._receiver.open(self._probe[-1], probe.nbytes)
        return ProbeOpened(self.endpoint, tuple(self._probe))

    async def send_probe(self, probe: SendProbe) -> None:
        """Send the pings one by one, each when the last must have arrived, then the bytes."""
        assert self._sender is not None
        assert self._nic is not None
        self._probe_sent.update(probe.tickets)
        for ticket in probe.tickets[:-1]:
            self._sender.send(probe.endpoint, ticket, 1)
            await asyncio.sleep(PING_GAP_S + 2 * (self._nic.delay_s + self._nic.jitter_s))
        self._sender.send(probe.endpoint, probe.tickets[-1], probe.nbytes)
        self._probe_sent_bytes += len(probe.tickets) - 1 + probe.nbytes

    def traffic(self) -> KvTraffic:
        """Counts up to now; any thread may ask."""
        scale = self._run.scale.bytes
        seen = KvTraffic()
        if self._sender is not None:
            sent = self._sender.stats()
            sent_bytes = max(0, sent.bytes - self._probe_sent_bytes) * scale
            waiting_bytes, waiting = sent.waiting_bytes * scale, sent.waiting_transfers
            seen = replace(seen, sent_bytes=sent_bytes, waiting_bytes=waiting_bytes, waiting_transfers=waiting)
        if self._receiver is not None:
            got = self._receiver.stats()
            reasons = ("no_ticket", "beyond_reserved", "out_of_sequence", "malformed", "bad_checksum")
            seen = replace(
                seen,
                received_bytes=(got.bytes - self._probe_bytes) * scale,
                broken_off=got.broken_off,
                dropped_frames={reason: getattr(got, reason) for reason in reasons},
            )
        return seen

    def end_record(self) -> None:
        """What goes through from now on is not reported. Idempotent."""
        self._recorded = self._recorded or self._report()

    def close(self) -> KvReport:
        """Close the sockets; what went through them while it was recorded."""
        self.end_record()
        assert self._recorded is not None
        report = self._recorded
        for end in (self._sender, self._receiver):
            if end is not None:
                end.close()
        if self._nic is not None:
            counts = self._nic.close()
            report = msgspec.structs.replace(
                report,
                qdisc_drops=counts.dropped_packets,
                tcp_retransmits=counts.retransmitted_segments,
            )
        return report

    def _report(self) -> KvReport:
        report = KvReport(transfers=tuple(self._transfers))
        if self._sender is not None:
            blocked_s = self._sender.stats().blocked_s / self._scaling.time
            report = msgspec.structs.replace(report, blocked_s=blocked_s)
        if self._receiver is not None:
            stats = self._receiver.stats()
            report = msgspec.structs.replace(
                report,
                received_bytes=stats.bytes - self._probe_bytes,
                unretained_bytes=stats.unretained_bytes,
                peak_retained_bytes=stats.peak_retained_bytes,
                dropped_frames=stats.dropped - stats.no_ticket,
                stray_frames=stats.no_ticket,
            )
        return report

    def _source(self, effect: Transmit) -> KvSource | None:
        if self._store is None or self._nic is None:
            return None
        return StoredSource(self._store, effect.blocks, self._nic.frame_bytes, verify=self._run.verify_kv)

    def _sink(self, effect: OpenTicket, nbytes: int) -> KvSink | None:
        if self._store is None:
            return None
        way = f"from {effect.source} to {self._node.name}"
        return StoredSink(self._store, effect.request_id, effect.blocks, nbytes, way=way, verify=self._run.verify_kv)

    # --- from the link's threads ------------------------------------------------------------------------------

    def _complete(self, arrival: Arrival) -> None:
        self._loop.call_soon_threadsafe(self._on_complete, arrival)

    def _begun(self, ticket: int, waited_s: float) -> None:
        if self.begun is not None and ticket not in self._probe_sent:
            self.begun(waited_s)

    def _link_failed(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._failed, error)

    def _on_complete(self, arrival: Arrival) -> None:
        if arrival.ticket in self._probe:
            self._on_probe(arrival)
            return
        expected = self._expected.pop(arrival.ticket, None)
        if expected is None:
            return
        model = self._clock.to_model_s
        parts = tuple((model(part.start_s), model(part.end_s), part.nbytes) for part in arrival.parts)
        if self._recorded is None:
            self._transfers.append(TransferRow(expected.request_id, self._node.name, parts, expected.source))
        nbytes = self._scaling.model_bytes(arrival.nbytes, expected.nbytes)
        self._arrived(arrival.ticket, nbytes, model(arrival.start_s), model(arrival.end_s))

    def _on_probe(self, arrival: Arrival) -> None:
        """One transfer of the probe is complete; the last one ends it."""
        assert self._receiver is not None
        assert self._nic is not None
        self._receiver.release(arrival.ticket)
        self._probe_seen.append(arrival)
        self._probe_bytes += arrival.nbytes
        if len(self._probe_seen) < len(self._probe):
            return
        *pings, bulk = sorted(self._probe_seen, key=lambda seen: self._probe.index(seen.ticket))
        self._probe = []
        self._probed(
            ProbeDone(bulk.end_s - bulk.start_s - self._nic.delay_s, tuple(p.end_s - p.start_s for p in pings))
        )

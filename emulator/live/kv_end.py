"""A node's end of the KV network in model terms: scales rates, sizes and times, keeps what each transfer took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from emulator.core.deploy import NodeSpec
from emulator.core.effects import CancelTransmit, CloseTicket, OpenTicket, Transmit
from emulator.core.scaling import Scaling
from emulator.live.clock import ModelClock
from emulator.live.kv_frames import Arrival
from emulator.live.kv_receiver import KvReceiver
from emulator.live.kv_sender import KvSender
from emulator.live.reports import KvReport, TransferRow
from emulator.live.status import Assignment


class KvEnd:
    """Sender, receiver or neither, by the node's role.

    `arrived(ticket, nbytes, start_s, end_s)` is called on the loop with model bytes and model seconds.
    """

    def __init__(
        self,
        task: Assignment,
        node: NodeSpec,
        clock: ModelClock,
        *,
        arrived: Callable[[int, int, float, float], None],
        failed: Callable[[Exception], None],
    ) -> None:
        run = task.run
        self._node = node
        self._clock = clock
        self._scaling = Scaling(run.scale)
        self._arrived = arrived
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._expected: dict[int, OpenTicket] = {}
        self._transfers: list[TransferRow] = []
        self._sender: KvSender | None = None
        self._receiver: KvReceiver | None = None
        if run.link is None:
            return
        rate = self._scaling.wall_bytes_per_s(run.link.payload_bps)
        if node.role == "prefill":
            self._sender = KvSender(egress_bytes_per_s=rate, verify=run.verify_kv, on_error=self._link_failed)
        if node.role == "decode":
            self._receiver = KvReceiver(
                f"tcp://{task.kv_address}:*",
                ingress_bytes_per_s=rate,
                delay_s=self._scaling.wall_s(run.link.delay_s),
                host_memory_bytes=task.host_memory_bytes,
                verify=run.verify_kv,
                on_complete=self._complete,
                on_error=self._link_failed,
            )

    @property
    def endpoint(self) -> str:
        """Where KV for this node goes; empty when it takes none."""
        return self._receiver.endpoint if self._receiver is not None else ""

    def transmit(self, effect: Transmit) -> None:
        """Hand one part of a transfer to the link."""
        assert self._sender is not None
        nbytes = self._scaling.wire_bytes(effect.offset, effect.nbytes, effect.total)
        if nbytes:
            self._sender.send(effect.endpoint, effect.ticket, nbytes)

    def cancel(self, effect: CancelTransmit) -> None:
        """Forget what has not left."""
        assert self._sender is not None
        self._sender.cancel(effect.ticket)

    def open(self, effect: OpenTicket) -> None:
        """Let a transfer in."""
        assert self._receiver is not None
        self._expected[effect.ticket] = effect
        self._receiver.open(effect.ticket, self._scaling.wire_bytes(0, effect.nbytes, effect.nbytes))

    def shut(self, effect: CloseTicket) -> None:
        """End a ticket and drop what it brought."""
        assert self._receiver is not None
        self._expected.pop(effect.ticket, None)
        self._receiver.release(effect.ticket)

    def close(self) -> KvReport:
        """Close the sockets; what went through them."""
        report = KvReport(transfers=tuple(self._transfers))
        if self._sender is not None:
            blocked_s = self._sender.stats().blocked_s / self._scaling.time
            self._sender.close()
            report = msgspec.structs.replace(report, blocked_s=blocked_s)
        if self._receiver is not None:
            stats = self._receiver.stats()
            self._receiver.close()
            report = msgspec.structs.replace(
                report,
                received_bytes=stats.bytes,
                unretained_bytes=stats.unretained_bytes,
                peak_retained_bytes=stats.peak_retained_bytes,
                dropped_frames=stats.dropped,
            )
        return report

    # --- from the link's threads ------------------------------------------------------------------------------

    def _complete(self, arrival: Arrival) -> None:
        self._loop.call_soon_threadsafe(self._on_complete, arrival)

    def _link_failed(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._failed, error)

    def _on_complete(self, arrival: Arrival) -> None:
        expected = self._expected.pop(arrival.ticket, None)
        if expected is None:
            return
        model = self._clock.to_model_s
        parts = tuple((model(part.start_s), model(part.end_s), part.nbytes) for part in arrival.parts)
        self._transfers.append(TransferRow(expected.request_id, self._node.name, parts))
        nbytes = self._scaling.model_bytes(arrival.nbytes, expected.nbytes)
        self._arrived(arrival.ticket, nbytes, model(arrival.start_s), model(arrival.end_s))

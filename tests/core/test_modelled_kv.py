"""KV under tickets: complete when every part is there, kept until the ticket is closed."""

from __future__ import annotations

from emulator.core.effects import CancelTransmit, CloseTicket, OpenTicket, Transmit
from emulator.core.modelled_kv import Arrival, ModelledKv
from tests.builders import load_plan, pair, run_spec

RUN = run_spec(pair(), load_plan(), payload_bytes_per_s=1_000.0)
"""One prefill and one decode node, a thousand bytes a second between them."""


def _open(kv: ModelledKv, ticket: int, nbytes: int) -> None:
    kv.open("decode-0", OpenTicket(f"r{ticket}", ticket, nbytes, "prefill-0"))


def _transmit(kv: ModelledKv, ticket: int, nbytes: int, now_s: float = 0.0) -> None:
    effect = Transmit(f"r{ticket}", ticket, "decode-0", "decode-0", 0, nbytes, nbytes)
    kv.transmit("prefill-0", effect, now_s)


def _arrivals(kv: ModelledKv, now_s: float) -> list[Arrival]:
    arrivals = list(kv.deliver(now_s))
    kv.check_integrity()
    return arrivals


def test_kv_is_complete_with_its_last_part_and_counts_from_its_first() -> None:
    kv = ModelledKv(RUN)
    _open(kv, 1, 300)
    _transmit(kv, 1, 100)
    assert _arrivals(kv, 0.5) == []
    _transmit(kv, 1, 200, 0.5)
    assert _arrivals(kv, 1.0) == [Arrival("decode-0", 1, 300, 0.0)]


def test_what_arrives_under_a_closed_ticket_is_nobodys() -> None:
    kv = ModelledKv(RUN)
    _open(kv, 1, 100)
    _transmit(kv, 1, 100)
    kv.close(CloseTicket(1))
    assert _arrivals(kv, 1.0) == []
    assert kv.peak_retained_bytes == 0


def test_kv_is_kept_until_its_ticket_is_closed() -> None:
    kv = ModelledKv(RUN)
    for ticket in (1, 2, 3):
        _open(kv, ticket, 100)
        _transmit(kv, ticket, 100, float(ticket))
        assert [arrival.ticket for arrival in _arrivals(kv, ticket + 0.5)] == [ticket]
        if ticket > 1:
            kv.close(CloseTicket(ticket - 1))
    assert kv.peak_retained_bytes == 200
    assert list(kv.tickets) == [3]


def test_what_was_cancelled_on_its_way_never_arrives() -> None:
    kv = ModelledKv(RUN)
    _open(kv, 1, 300)
    _transmit(kv, 1, 100)
    _transmit(kv, 1, 200)
    kv.cancel(CancelTransmit(1), 0.05)
    assert kv.network.next_event_s() is None
    assert _arrivals(kv, 9.0) == []

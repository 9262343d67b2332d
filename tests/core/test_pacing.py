"""A card's slots follow each other exactly, keep to their rate for ever, and never start too early."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.pacing import Nic, Slot, frame_bytes_for, payload_bits_per_s
from emulator.core.specs import RateBasis

KIB = 1024
MIB = 1024 * KIB


def test_slots_follow_back_to_back() -> None:
    nic = Nic(1000.0)
    assert [nic.reserve(500, 10.0) for _ in range(3)] == [Slot(10.0, 10.5), Slot(10.5, 11.0), Slot(11.0, 11.5)]


def test_an_idle_card_starts_when_asked() -> None:
    nic = Nic(1000.0)
    nic.reserve(1000, 0.0)
    assert nic.reserve(1000, 5.0) == Slot(5.0, 6.0)


def test_a_late_request_catches_up() -> None:
    nic = Nic(1000.0)
    nic.reserve(1000, 0.0)
    assert nic.reserve(1000, 0.25) == Slot(1.0, 2.0)


def test_two_senders_share_one_card() -> None:
    nic = Nic(1000.0)
    assert nic.reserve(100, 0.0) == Slot(0.0, 0.1)
    assert nic.reserve(100, 0.0) == Slot(0.1, 0.2)


def test_cut_through_at_the_same_rate_costs_nothing() -> None:
    egress, ingress = Nic(3e8 / 7), Nic(3e8 / 7)
    for _ in range(10_000):
        sent = egress.reserve(64 * KIB + 1, 12.3)
        received = ingress.reserve(64 * KIB + 1, sent.start_s)
        assert received.end_s == pytest.approx(sent.end_s, abs=1e-9)


def test_a_million_frames_do_not_drift() -> None:
    nic = Nic(125e6)
    for _ in range(1_000_000):
        end_s = nic.reserve(65_536, 100_000.0).end_s
    assert end_s == 100_000.0 + 1_000_000 * 65_536 / 125e6


def test_unshaped_slots_have_no_length() -> None:
    nic = Nic(None)
    assert nic.reserve(10**9, 3.0) == Slot(3.0, 3.0)
    assert nic.reserve(10**9, 4.0) == Slot(4.0, 4.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Nic(rate)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot reserve"):
        Nic(1.0).reserve(-1, 0.0)


@given(
    rate=st.floats(1e3, 1e11) | st.none(),
    requests=st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 1e6)), min_size=1, max_size=50),
)
def test_slots_never_overlap_nor_start_early(rate: float | None, requests: list[tuple[int, float]]) -> None:
    nic = Nic(rate)
    previous_end_s = -math.inf
    for nbytes, not_before_s in requests:
        slot = nic.reserve(nbytes, not_before_s)
        assert slot.start_s == max(not_before_s, previous_end_s)
        length_s = 0.0 if rate is None else nbytes / rate
        assert slot.end_s - slot.start_s == pytest.approx(length_s, abs=1e-6, rel=1e-9)
        previous_end_s = slot.end_s


@pytest.mark.parametrize(("basis", "payload"), [("line", 1e9 * 1448 / 1514), ("payload", 1e9)])
def test_payload_rate(basis: RateBasis, payload: float) -> None:
    assert payload_bits_per_s(1e9, basis) == pytest.approx(payload)


@pytest.mark.parametrize(
    ("bits_per_s", "expected"),
    [
        (1e3, 64 * KIB),
        (100e6, 64 * KIB),
        (1e9, 128 * KIB),
        (2e9, 256 * KIB),
        (5e9, 512 * KIB),
        (10e9, MIB),
        (100e9, MIB),
        (None, MIB),
    ],
)
def test_frame_size_is_about_a_millisecond(bits_per_s: float | None, expected: int) -> None:
    assert frame_bytes_for(None if bits_per_s is None else bits_per_s / 8) == expected


@pytest.mark.parametrize(("bits_per_s", "kib"), [(1e8, 64), (1e9, 128), (2.5e9, 128), (5e9, 128), (10e9, 1024)])
def test_where_the_kernel_shapes_frames_stay_short_as_long_as_they_carry_the_rate(bits_per_s: float, kib: int) -> None:
    assert frame_bytes_for(bits_per_s / 8, kernel_shaped=True) == kib * 1024

"""Quantities with units: what is read, what is refused and how refusals help."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.errors import ConfigError
from emulator.core.quantities import QUANTITIES, BitsPerSecond, Bytes, Quantity, Seconds
from tests.examples import examples


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (BitsPerSecond, "10Gbps", 10e9),
        (BitsPerSecond, "2.5 Gbps", 2.5e9),
        (BitsPerSecond, "  100Mbps ", 100e6),
        (BitsPerSecond, "64kbps", 64e3),
        (BitsPerSecond, "1e3bps", 1_000.0),
        (BitsPerSecond, "2Tbps", 2e12),
        (Bytes, "64MiB", 64 * 2**20),
        (Bytes, "64MB", 64e6),
        (Bytes, "1.5GiB", 1.5 * 2**30),
        (Bytes, "7B", 7.0),
        (Bytes, "1kB", 1_000.0),
        (Bytes, "1KiB", 1_024.0),
        (Seconds, "20s", 20.0),
        (Seconds, "50us", 50e-6),
        (Seconds, "50µs", 50e-6),
        (Seconds, "50μs", 50e-6),
        (Seconds, "1.5ms", 1.5e-3),
        (Seconds, "2min", 120.0),
        (Seconds, "1h", 3_600.0),
        (Seconds, "0s", 0.0),
        (Seconds, "3ns", 3e-9),
    ],
)
def test_a_number_with_a_unit_is_read(kind: type[Quantity], text: str, value: float) -> None:
    parsed = kind.parse(text)
    assert type(parsed) is kind
    assert parsed == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (BitsPerSecond, "10", "the unit is missing; units are bps, kbps, Mbps, Gbps, Tbps"),
        (BitsPerSecond, "10G", "'G' is not a unit"),
        (BitsPerSecond, "10gbps", "did you mean Gbps?"),
        (BitsPerSecond, "10GBps", "did you mean Gbps?"),
        (BitsPerSecond, "10GB/s", "bandwidth is in bits per second, so multiply bytes by 8"),
        (BitsPerSecond, "10MB", "multiply bytes by 8"),
        (BitsPerSecond, "0Gbps", "must be greater than 0"),
        (BitsPerSecond, "-1Gbps", "write a number and a unit, such as 10Gbps"),
        (BitsPerSecond, "Gbps", "write a number and a unit"),
        (BitsPerSecond, "", "write a number and a unit"),
        (BitsPerSecond, "nanGbps", "write a number and a unit"),
        (BitsPerSecond, "1e999Gbps", "must be greater than 0"),
        (BitsPerSecond, "1Gbps 2Gbps", "write a number and a unit"),
        (Bytes, "64", "the unit is missing"),
        (Bytes, "64mib", "did you mean MiB?"),
        (Bytes, "64Mb", "did you mean MB?"),
        (Bytes, "0MiB", "must be greater than 0"),
        (Bytes, "64Mbps", "units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        (Seconds, "20", "the unit is missing"),
        (Seconds, "20 sec", "'sec' is not a unit; units are s, ms, us, ns, min, h"),
        (Seconds, "20S", "did you mean s?"),
        (Seconds, "-20s", "write a number and a unit, such as 50us"),
    ],
)
def test_a_refusal_names_the_text_and_what_would_be_right(kind: type[Quantity], text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.parse(text)
    assert repr(text) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (BitsPerSecond(2.5e9), "2.5Gbps"),
        (BitsPerSecond(2e12), "2Tbps"),
        (BitsPerSecond(999.0), "999bps"),
        (Bytes(64e6), "64MB"),
        (Bytes(1), "1B"),
        (Seconds(1.5e-3), "1.5ms"),
        (Seconds(20), "20s"),
        (Seconds(0), "0ns"),
    ],
)
def test_a_quantity_is_shown_in_the_unit_that_fits(quantity: Quantity, text: str) -> None:
    assert str(quantity) == text


@examples(100)
@given(st.sampled_from(QUANTITIES), st.floats(1e-9, 9e14))
def test_what_is_shown_can_be_read_again(kind: type[Quantity], value: float) -> None:
    if kind is BitsPerSecond:
        value = max(1.0, value)
    assert kind.parse(str(kind(value))) == pytest.approx(value, rel=1e-3)

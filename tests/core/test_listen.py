"""Addresses to serve at."""

from __future__ import annotations

import pytest

from emulator.core.errors import ConfigError
from emulator.core.listen import Listen


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, True),
        ("localhost:0", "127.0.0.1", 0, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, host: str, port: int, loopback: bool) -> None:
    found = Listen.parse(text, "--x")
    assert (found.host, found.port, found.loopback) == (host, port, loopback)
    assert Listen.parse(str(found), "--x") == found


@pytest.mark.parametrize("text", ["80", ":80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "name:80", "127.0.0.1:-1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--x {text}: must be ADDRESS:PORT"):
        Listen.parse(text, "--x")


def test_ports_follow_each_other_and_free_ones_stay_free() -> None:
    assert Listen(port=80).following(2).port == 82
    assert Listen().following(2).port == 0
    with pytest.raises(ConfigError, match="no 2 ports come after it"):
        Listen(port=65534).following(2)


def test_metrics_beyond_loopback_are_shown_on_purpose() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        Listen.parse_metrics("0.0.0.0:9100", insecure=False)
    assert Listen.parse_metrics("0.0.0.0:9100", insecure=True).port == 9100

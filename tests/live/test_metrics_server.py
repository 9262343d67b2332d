"""Metrics on an address of their own: who is answered how, and what is left when it is closed."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from emulator.core.errors import ConfigError
from emulator.core.listen import Listen
from emulator.live.metrics_server import MetricsServer

pytestmark = pytest.mark.live

LIMIT_S = 10.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(Listen())
    server.start()
    yield server
    server.close()


def ask(url: str, **headers: str) -> tuple[int, str, bytes]:
    """Status, content type and body of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=LIMIT_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_a_scrape_is_answered_with_what_there_is_by_then(server: MetricsServer) -> None:
    assert ask(server.url)[0] == 503
    server.exposition = lambda: (b"a 1\n", "text/plain; version=0.0.4")
    assert ask(server.url) == (200, "text/plain; version=0.0.4", b"a 1\n")
    openmetrics = ask(server.url, Accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics == (200, "text/plain; version=0.0.4", b"a 1\n")


def test_there_is_nothing_else(server: MetricsServer) -> None:
    status, _, body = ask(server.url.removesuffix("/metrics") + "/else")
    assert (status, body) == (404, b"there is only /metrics\n")


def test_a_client_that_says_nothing_keeps_no_other_one_waiting(server: MetricsServer) -> None:
    server.exposition = lambda: (b"", "text/plain")
    port = int(server.url.rpartition(":")[2].removesuffix("/metrics"))
    with socket.create_connection(("127.0.0.1", port), LIMIT_S):
        assert ask(server.url)[0] == 200


def test_when_it_is_closed_the_port_is_free() -> None:
    server = MetricsServer(Listen())
    server.start()
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        ask(server.url)
    port = int(server.url.rpartition(":")[2].removesuffix("/metrics"))
    again = MetricsServer(Listen(port=port))
    again.close()


def test_a_port_that_is_taken_is_refused_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics 127.0.0.1:{port}: cannot listen there"):
            MetricsServer(Listen(port=port))

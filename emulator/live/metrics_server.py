"""A process's metrics on an address of its own, served by threads of their own: its event loop never sees a scrape."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.exposition import ThreadingWSGIServer

from emulator.core.errors import ConfigError
from emulator.core.listen import Listen

PATH = "/metrics"
IDLE_S = 10.0
POLL_S = 0.1

Exposition = Callable[[], tuple[bytes, str]]
"""What a scrape is answered with, and its content type."""


class _Handler(WSGIRequestHandler):
    """Says nothing of requests, and waits for none for ever."""

    timeout = IDLE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


class _IPv6Server(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class MetricsServer:
    """Listens at once, and serves from `start` on; `exposition` may be set later. Raises ConfigError for a taken port.

    In a network namespace it is reached where it was made.
    """

    def __init__(self, listen: Listen) -> None:
        self.exposition: Exposition | None = None
        kind: type[WSGIServer] = _IPv6Server if ":" in listen.host else ThreadingWSGIServer
        try:
            self._server = make_server(listen.host, listen.port, self._answer, kind, handler_class=_Handler)
        except OSError as error:
            raise ConfigError(
                f"--metrics {listen}: cannot listen there ({error.strerror}); give a free port, or 0 for any"
            ) from None
        self.url = f"http://{Listen(host=listen.host, port=self._server.server_port)}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the socket. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [f"there is only {PATH}\n".encode()]
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET"), ("Content-Type", "text/plain")])
            return [f"{PATH} takes GET\n".encode()]
        if self.exposition is None:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"not part of a cluster yet\n"]
        body, content_type = self.exposition()
        start_response("200 OK", [("Content-Type", content_type)])
        return [body]

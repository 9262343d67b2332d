"""The server that a load test is sent to, and how it is asked."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from emulator.core.bench.prompts import Api
from emulator.core.bench.redaction import SHORTEST_HEADER, Redaction, shown_url
from emulator.core.errors import ConfigError

ROUTER_SCHEME = "tcp"
ROUTER_BACKEND = "pdemu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server: `base_url` without a path of the API or credentials, `endpoint` with the path.

    `credentials` are a name and a password; `headers` and the fields of `extra_body` go over what is sent otherwise.
    The n-th request of a run says `X-Request-Id: {request_id_prefix}{n}`.
    """

    base_url: str
    endpoint: str
    api_key: str | None = field(default=None, repr=False)
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    request_id_prefix: str = ""
    verify_certificate: bool = True
    timeout_s: float = 6 * 3600.0
    ignore_eos: bool = True
    token_ids: bool = False
    keep_text: bool = False

    @property
    def api(self) -> Api:
        """Which of the two APIs the endpoint speaks."""
        return "chat" if self.endpoint.rstrip("/").endswith("chat/completions") else "completions"

    @property
    def backend(self) -> str:
        """What vLLM's benchmark calls it."""
        return "openai-chat" if self.api == "chat" else "openai"

    @property
    def sent_headers(self) -> dict[str, str]:
        """Headers of every request: those that were given, and who asks, unless they say that themselves."""
        given = dict(self.headers)
        if "authorization" in {name.lower() for name in given}:
            return given
        if self.credentials is not None:
            return {"Authorization": f"Basic {_basic(self.credentials)}"} | given
        return ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}) | given

    @property
    def redaction(self) -> Redaction:
        """Hides what identifies whoever asks; a header's value that is too short to be a key is let be."""
        secrets = [value for value in self.headers.values() if len(value) >= SHORTEST_HEADER]
        secrets += [word for value in secrets for word in value.split() if len(word) >= SHORTEST_HEADER]
        secrets += [self.api_key or ""]
        if self.credentials is not None:
            secrets += [self.credentials[1], _basic(self.credentials)]
        return Redaction(secrets)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTarget:
    """The router of an emulated cluster, `tcp://host:port`, and what it takes to be let in.

    It is waited for `ready_s` wall seconds. The n-th request's id is `{request_id_prefix}{n}`; it fails after
    `timeout_s` of the run's own time.
    """

    endpoint: str
    secret: str = field(default="", repr=False)
    public_key: str = ""
    insecure: bool = False
    request_id_prefix: str = ""
    ready_s: float = 10.0
    timeout_s: float = 6 * 3600.0


def is_router(url: str) -> bool:
    """Whether a URL is that of a router's control network, and not of an HTTP server."""
    return url.startswith(f"{ROUTER_SCHEME}://")


def base_url(url: str, endpoint: str) -> str:
    """The server's address without a path of the API, of which users give one with `/v1` or without, or credentials."""
    parts = _parts(url)
    if not endpoint.startswith("/") or not endpoint.rstrip("/").endswith("completions"):
        raise ConfigError(f"--endpoint {endpoint}: give /v1/completions or /v1/chat/completions")
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return address.rstrip("/").removesuffix(endpoint).removesuffix("/v1")


def credentials(url: str) -> tuple[str, str] | None:
    """The name and password that a server's URL has, if any."""
    parts = _parts(url)
    if parts.username is None and parts.password is None:
        return None
    return unquote(parts.username or ""), unquote(parts.password or "")


def _parts(url: str) -> SplitResult:
    """Raises ConfigError, without telling credentials, for what is no server's URL."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise ConfigError(
            f"--url {shown_url(url)}: give the address of a server, such as http://127.0.0.1:8000, or of a router, "
            "such as tcp://127.0.0.1:5555"
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"--url {shown_url(url)}: must end with the path, without ? or #")
    return parts


def _basic(pair: tuple[str, str]) -> str:
    return base64.b64encode(":".join(pair).encode()).decode("ascii")

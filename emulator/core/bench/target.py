"""The server that a load test is sent to, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from emulator.core.bench.prompts import Api
from emulator.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and how it is asked: `base_url` without a path of the API, `endpoint` with it."""

    base_url: str
    endpoint: str
    api_key: str | None = None
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


def base_url(url: str, endpoint: str) -> str:
    """The server's address without a path of the API, of which users give one with `/v1` or without."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise ConfigError(f"--url {url}: give the address of a server, such as http://127.0.0.1:8000")
    if not endpoint.startswith("/") or not endpoint.rstrip("/").endswith("completions"):
        raise ConfigError(f"--endpoint {endpoint}: give /v1/completions or /v1/chat/completions")
    return url.rstrip("/").removesuffix(endpoint).removesuffix("/v1")

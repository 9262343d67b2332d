"""Requests to an OpenAI-compatible server over HTTP, streamed: the driver of `pdemu bench --url`.

Nothing is sent anywhere but to the URL that was given: redirects are not followed, and proxies of the environment are
not used.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from emulator.core.bench.exchange import Exchange, Seen
from emulator.core.bench.prompts import (
    CALIBRATION_WORDS,
    POOL_WORDS,
    Calibration,
    Prompt,
    PromptPool,
    request_body,
)
from emulator.core.bench.stream import OpenAiStream, error_body_text, excerpt
from emulator.core.bench.target import Target
from emulator.core.errors import ConfigError
from emulator.core.workload import PlannedRequest

CHECK_S = 10.0
ERROR_BODY_BYTES = 4096
CONNECT_S = 30.0
WARM_UP_NUMBER = POOL_WORDS // 2
# Less than the five seconds after which uvicorn closes a connection that rests, so that no request meets its end.
KEEP_ALIVE_S = 3.0
# A stream that is compressed on its way is also held back on it.
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class OpenAiClient:
    """One HTTP session; `async with` opens and closes it."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._pool = PromptPool(seed)
        self._session: aiohttp.ClientSession
        self.model = ""
        self.calibration: Calibration | None = None

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s, sock_connect=CONNECT_S),
            headers=headers,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    # --- before the run -------------------------------------------------------------------------------------------

    async def prepare(self, model: str | None) -> None:
        """Reach the server, settle the model, and make some first requests, which tell how long its prompts are.

        Raises ConfigError for a server that cannot be reached, names no model where none was given, or refuses.
        """
        served = await self._served_models()
        if model is None and not served:
            raise ConfigError(f"--model: {self._target.base_url}/v1/models names no model; give the one to ask for")
        self.model = model or served[0]
        if self._target.token_ids:
            await self._try(self._pool.ids(0, CALIBRATION_WORDS[0]))
            return
        few, many = CALIBRATION_WORDS
        counted = (await self._try(self._pool.text(0, few)), await self._try(self._pool.text(1, many)))
        self.calibration = Calibration.of((few, many), counted)

    async def warm_up(self, request: PlannedRequest, n: int, now_s: Callable[[], float]) -> None:
        """A request that is not counted, the n-th, with a prompt that no request of the run begins with."""
        await self.perform(Exchange(WARM_UP_NUMBER + n, request, 0.0), now_s)

    async def _served_models(self) -> list[str]:
        url = self._target.base_url
        try:
            async with self._session.get(
                f"{url}/v1/models", allow_redirects=False, timeout=aiohttp.ClientTimeout(total=CHECK_S)
            ) as response:
                if response.status != 200:
                    return []
                return _model_ids(await response.read())
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reason, message = _failure(error)
            raise ConfigError(
                f"--url {url}: cannot be reached ({reason}{': ' + message if message else ''}); "
                "give the address of a server that runs, such as http://127.0.0.1:8000"
            ) from None

    async def _try(self, prompt: Prompt) -> int | None:
        """One token for a short prompt; how many tokens the server says that the prompt had."""
        seen = Seen()
        await self._post(seen, self._body(prompt, 1), lambda: 0.0)
        if seen.reason:
            said = f"{seen.reason}: {seen.message}" if seen.message else seen.reason
            raise ConfigError(
                f"--url {self._target.base_url}: a first request to {self._target.endpoint} for model {self.model} "
                f"failed ({said}); see that --endpoint, --model and --api-key are what the server takes"
            )
        return seen.prompt_tokens

    # --- the run --------------------------------------------------------------------------------------------------

    async def perform(self, exchange: Exchange, now_s: Callable[[], float]) -> None:
        """Send one request and read its stream to the end (`live.bench.RequestDriver`)."""
        request = exchange.request
        body = self._body(self._prompt(exchange), request.max_tokens)
        exchange.sent_s = now_s()
        await self._post(exchange.seen, body, now_s)

    def _prompt(self, exchange: Exchange) -> Prompt:
        tokens = exchange.request.prompt_tokens
        number = exchange.number + len(CALIBRATION_WORDS)
        if self._target.token_ids:
            return self._pool.ids(number, tokens)
        return self._pool.text(number, (self.calibration or Calibration()).words(tokens))

    def _body(self, prompt: Prompt, max_tokens: int) -> bytes:
        return request_body(self._target.api, self.model, prompt, max_tokens, ignore_eos=self._target.ignore_eos)

    async def _post(self, seen: Seen, body: bytes, now_s: Callable[[], float]) -> None:
        stream = OpenAiStream(seen, keep_text=self._target.keep_text)
        url = f"{self._target.base_url}{self._target.endpoint}"
        try:
            async with self._session.post(url, data=body, headers=_HEADERS, allow_redirects=False) as response:
                if response.status != 200:
                    seen.fail(f"HTTP {response.status}", error_body_text(await response.content.read(ERROR_BODY_BYTES)))
                    return
                if response.content_type != "text/event-stream":
                    text = excerpt(await response.content.read(ERROR_BODY_BYTES))
                    seen.fail("not an event stream", f"{response.content_type}: {text}")
                    return
                async for data in response.content.iter_any():
                    stream.feed(data, now_s())
                    if seen.reason:
                        break
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if not stream.over:
                seen.fail(*_failure(error))
        stream.end(now_s())


def _failure(error: Exception) -> tuple[str, str]:
    """A few words to count by, and what is known besides."""
    if isinstance(error, TimeoutError):
        return "timeout", ""
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = error.os_error.errno == errno.ECONNREFUSED
        return ("connection refused" if refused else "cannot connect"), error.os_error.strerror or str(error.os_error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "server disconnected", ""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "connection cut", excerpt(str(error).encode())
    if isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "connection reset", ""
    return type(error).__name__, excerpt(str(error).encode())


def _model_ids(body: bytes) -> list[str]:
    try:
        found: Any = msgspec.json.decode(body)
        return [model["id"] for model in found["data"] if isinstance(model["id"], str)]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return []

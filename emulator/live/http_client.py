"""Requests to an OpenAI-compatible server over HTTP, streamed: the driver of `pdemu bench --url`.

Nothing is sent anywhere but to the URL that was given: redirects are not followed, and proxies of the environment are
not used.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from multidict import CIMultiDict

from emulator.core.bench.exact_prompts import ExactPrompts, WordTokens
from emulator.core.bench.exchange import Exchange, Seen
from emulator.core.bench.prompts import (
    CALIBRATION_WORDS,
    POOL_WORDS,
    WORDS,
    Calibration,
    Prompt,
    PromptFit,
    PromptPool,
    request_body,
)
from emulator.core.bench.stream import OpenAiStream, error_body_text, excerpt, one_line
from emulator.core.bench.target import Target
from emulator.core.errors import ConfigError, NotReadyError
from emulator.core.workload import PlannedRequest

CHECK_S = 10.0
ERROR_BODY_BYTES = 4096
CONNECT_S = 30.0
WARM_UP_NUMBER = POOL_WORDS // 2
TOKENIZE_AT_A_TIME = 16
# Less than the five seconds after which uvicorn closes a connection that rests, so that no request meets its end.
KEEP_ALIVE_S = 3.0
# A stream that is compressed on its way is also held back on it.
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class OpenAiClient:
    """One HTTP session; `async with` opens and closes it. Times are wall time, whatever the server emulates."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._hidden = target.redaction
        self._pool = PromptPool(seed)
        self._session: aiohttp.ClientSession
        self.model = ""
        self.scale_time: float | None = None
        self.calibration: Calibration | None = None
        self.exact: ExactPrompts | None = None

    @property
    def prompt_fit(self) -> PromptFit:
        """How prompts come to their lengths."""
        if self._target.token_ids or self.exact is not None:
            return "exact"
        return "word_per_token" if self.calibration is None else "calibrated"

    async def __aenter__(self) -> Self:
        headers = CIMultiDict(_HEADERS)
        headers.update(self._target.sent_headers)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S, ssl=self._target.verify_certificate
            ),
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

        Raises NotReadyError for a server that cannot be reached, names no model where none was given, or fails;
        ConfigError for one that refuses.
        """
        served = await self._served_models()
        if model is None and not served:
            raise NotReadyError(f"--model: {self._target.base_url}/v1/models names no model; give the one to ask for")
        self.model = model or served[0]
        if self._target.token_ids:
            await self._try(self._pool.ids(0, CALIBRATION_WORDS[0]))
            return
        few, many = self._pool.calibration_texts()
        counted = (await self._try(few), await self._try(many))
        self.calibration = Calibration.of(CALIBRATION_WORDS, counted)
        if self.calibration is not None and counted[0] is not None and counted[1] is not None:
            self.exact = await self._exact_prompts([(few, counted[0]), (many, counted[1])])

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
            reason, message = self._failure(error)
            raise NotReadyError(
                f"--url {url}: cannot be reached ({reason}{': ' + message if message else ''}); "
                "give the address of a server that runs, such as http://127.0.0.1:8000"
            ) from None

    async def _try(self, prompt: Prompt) -> int | None:
        """One token for a short prompt; how many tokens the server says that the prompt had."""
        seen = Seen()
        await self._post(seen, self._body(prompt, 1), lambda: 0.0)
        if seen.reason:
            said = f"{seen.reason}: {seen.message}" if seen.message else seen.reason
            kind = ConfigError if seen.reason.startswith("HTTP 4") else NotReadyError
            raise kind(
                f"--url {self._target.base_url}: a first request to {self._target.endpoint} for model {self.model} "
                f"failed ({said}); see that --endpoint, --model and --api-key are what the server takes"
            )
        return seen.prompt_tokens

    async def _exact_prompts(self, counted: Sequence[tuple[str, int]]) -> ExactPrompts | None:
        """Prompts to the token, where the server has vLLM's `/tokenize` and it explains the texts already counted."""
        if await self._tokens_of(WORDS[0]) is None:
            return None
        turns = asyncio.Semaphore(TOKENIZE_AT_A_TIME)

        async def one(text: str) -> int | None:
            async with turns:
                return await self._tokens_of(text)

        found = await asyncio.gather(*(one(f" {word}") for word in WORDS), *(one(word) for word in WORDS))
        tokens = [count for count in found if count is not None]
        if len(tokens) < len(found):
            return None
        words = WordTokens.of(tokens[: len(WORDS)], tokens[len(WORDS) :], counted)
        return None if words is None else ExactPrompts(self._pool, words)

    async def _tokens_of(self, text: str) -> int | None:
        """How many tokens the server's tokenizer makes of a text; None where it does not say."""
        body = msgspec.json.encode({"model": self.model, "prompt": text, "add_special_tokens": False})
        try:
            async with self._session.post(
                f"{self._target.base_url}/tokenize",
                data=body,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=CHECK_S),
            ) as response:
                if response.status != 200:
                    return None
                return len(msgspec.json.decode(await response.read(), type=_Tokenized).tokens)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    # --- the run --------------------------------------------------------------------------------------------------

    async def perform(self, exchange: Exchange, now_s: Callable[[], float]) -> None:
        """Send one request and read its stream to the end (`live.bench.RequestDriver`)."""
        request = exchange.request
        body = self._body(self._prompt(exchange), request.max_tokens)
        exchange.sent_s = now_s()
        await self._post(exchange.seen, body, now_s, f"{self._target.request_id_prefix}{exchange.number}")

    def _prompt(self, exchange: Exchange) -> Prompt:
        tokens = exchange.request.prompt_tokens
        number = exchange.number + len(CALIBRATION_WORDS)
        if self._target.token_ids:
            return self._pool.ids(number, tokens)
        if self.exact is not None:
            return self.exact.text(number, tokens)
        return self._pool.text(number, (self.calibration or Calibration()).words(tokens))

    def _body(self, prompt: Prompt, max_tokens: int) -> bytes:
        target = self._target
        return request_body(
            target.api, self.model, prompt, max_tokens, ignore_eos=target.ignore_eos, extra=target.extra_body
        )

    async def _post(self, seen: Seen, body: bytes, now_s: Callable[[], float], request_id: str = "") -> None:
        stream = OpenAiStream(seen, keep_text=self._target.keep_text, hidden=self._hidden)
        headers = {"X-Request-Id": request_id} if request_id else {}
        url = f"{self._target.base_url}{self._target.endpoint}"
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    said = await response.content.read(ERROR_BODY_BYTES)
                    seen.fail(f"HTTP {response.status}", error_body_text(said, self._hidden))
                    return
                if response.content_type != "text/event-stream":
                    text = excerpt(await response.content.read(ERROR_BODY_BYTES), self._hidden)
                    seen.fail("not an event stream", f"{response.content_type}: {text}")
                    return
                async for data in response.content.iter_any():
                    stream.feed(data, now_s())
                    if seen.reason:
                        break
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if not stream.over:
                seen.fail(*self._failure(error))
        stream.end(now_s())

    def _failure(self, error: Exception) -> tuple[str, str]:
        reason, message = _failure(error)
        return reason, one_line(message, self._hidden)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


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
        return "connection cut", str(error)
    if isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "connection reset", ""
    return type(error).__name__, str(error)


def _model_ids(body: bytes) -> list[str]:
    try:
        found: Any = msgspec.json.decode(body)
        return [model["id"] for model in found["data"] if isinstance(model["id"], str)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return []

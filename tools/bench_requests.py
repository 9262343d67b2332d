"""How long the endpoint's loop is busy with a large request: the largest that are served, and some that are not.

    python tools/bench_requests.py [CONTEXT_TOKENS]

Streams of other clients wait meanwhile. Decoding and the rest are two turns of the loop; the median of each in
milliseconds, and the longer one as a share of a step of 25 ms.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec

from emulator.core import api, completion_request
from emulator.core.api_error import ApiError
from emulator.core.completion_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body

STEP_MS = 25.0
REPEATS = 9


def _bodies(context: int) -> dict[str, tuple[type[msgspec.Struct], object]]:
    """By name: the kind of body, and what it has."""
    part, message = {"type": "text", "text": "x"}, {"role": "user", "content": ""}
    words = " zusu kase" * (context // 2 - 8)
    long_stops = [" a" * 16_000 + f"b{n}" for n in range(64)]
    return {
        "a prompt of ids": (CompletionBody, {"prompt": [31_234] * (context - 16)}),
        "a prompt of words": (CompletionBody, {"prompt": words}),
        "a chat, a stop, no max_tokens": (ChatBody, {"messages": [message], "stop": "never"}),
        "64 long stops": (CompletionBody, {"prompt": "a", "max_tokens": context - 1, "stop": long_stops}),
        "many messages": (ChatBody, {"messages": [message] * min(8_192, context // 16)}),
        "many parts": (ChatBody, {"messages": [{"role": "user", "content": [part] * (context // 4)}]}),
        "text to tokens": (TokenizeBody, {"prompt": words}),
        "tokens to text": (DetokenizeBody, {"tokens": [6_000] * context}),
        "refused: ids, the last one -1": (CompletionBody, {"prompt": [1] * (context - 16) + [-1]}),
        "refused: 8 times the ids": (CompletionBody, {"prompt": [1] * context * 8}),
        "refused: 8 times the text": (CompletionBody, {"prompt": "zq" * context * 4}),
        "refused: messages": (ChatBody, {"messages": [message] * (context // 2)}),
        "refused: parts": (ChatBody, {"messages": [{"role": "user", "content": [part] * (context // 2)}]}),
    }


def _act(body: msgspec.Struct, context: int) -> None:
    match body:
        case CompletionBody():
            completion_request.completion(body, model="m", context_tokens=context)
        case ChatBody():
            completion_request.chat(body, model="m", context_tokens=context)
        case TokenizeBody():
            api.tokenize(body, context)
        case DetokenizeBody():
            api.detokenize(body, context)


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        with contextlib.suppress(ApiError):
            work()
        times.append((time.perf_counter() - start_s) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure every body and print a line for each."""
    context = int(sys.argv[1]) if len(sys.argv) > 1 else 131_072
    print(f"a context of {context:,} tokens{'':9} decode ms   rest ms   of a step")
    for name, (kind, content) in _bodies(context).items():
        data = msgspec.json.encode(content)
        reading = partial(read_body, data, kind, context)
        decode_ms = _median_ms(reading)
        try:
            rest_ms = _median_ms(partial(_act, reading(), context))
        except ApiError:
            rest_ms = 0.0
        print(f"{name:36} {decode_ms:9.2f} {rest_ms:9.2f} {max(decode_ms, rest_ms) / STEP_MS:11.0%}")


if __name__ == "__main__":
    main()

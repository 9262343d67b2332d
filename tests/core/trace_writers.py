"""Writes every format of trace file, as the tools that publish them do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

from emulator.core.traffic import TraceFormat

Row = tuple[int, int, int]
"""Time in nanoseconds, prompt tokens, output tokens."""

START = datetime(2024, 5, 10, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Written:
    """A format: the lines of a file of it, and the nanoseconds that its times are multiples of."""

    name: TraceFormat
    resolution_ns: int
    lines: Callable[[Sequence[Row]], list[str]]


def date(ns: int, *, digits: int, zone: str = "", separator: str = " ") -> str:
    """A time after START with so many digits of a fraction; `zone` is nothing, Z, or an offset such as +05:30."""
    instant = START + timedelta(seconds=ns // 10**9)
    if zone not in ("", "Z"):
        sign = -1 if zone[0] == "-" else 1
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6])) * sign
        instant = instant.astimezone(timezone(offset))
    fraction = f".{ns % 10**9:09d}"[: digits + 1] if digits else ""
    return instant.strftime(f"%Y-%m-%d{separator}%H:%M:%S") + fraction + zone


def number(ns: int, unit_ns: int) -> str:
    """An exact decimal."""
    text = format(Decimal(ns) / unit_ns, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _azure_2023(rows: Sequence[Row]) -> list[str]:
    return ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{date(t, digits=7)},{p},{o}" for t, p, o in rows)]


def _azure_2024(rows: Sequence[Row]) -> list[str]:
    """A row on a whole second has no fraction, as pandas writes it."""
    return [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        *(f"{date(t, digits=0 if t % 10**9 == 0 else 6, zone='+00:00')},{p},{o}" for t, p, o in rows),
    ]


def _azure_2025(rows: Sequence[Row]) -> list[str]:
    return [
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
        *(f"{date(t, digits=6, zone='Z', separator='T')},3,{p},{o}" for t, p, o in rows),
    ]


def _burstgpt_1(rows: Sequence[Row]) -> list[str]:
    return [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        *(f"{t // 10**9},ChatGPT,{p},{o},{p + o},Conversation log" for t, p, o in rows),
    ]


def _burstgpt_3(rows: Sequence[Row]) -> list[str]:
    return [
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        *(f"{number(t, 10**9)},17,2.5,GPT-4,{p},{o},{p + o},API log" for t, p, o in rows),
    ]


def _vidur(rows: Sequence[Row]) -> list[str]:
    return [
        ",arrived_at,num_prefill_tokens,num_decode_tokens",
        *(f"{n},{number(t, 10**9)},{p},{o}" for n, (t, p, o) in enumerate(rows)),
    ]


def _splitwise(rows: Sequence[Row]) -> list[str]:
    return [
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
        *(f"{n},2,0,{number(t, 10**9)},1,{p},{o}" for n, (t, p, o) in enumerate(rows)),
    ]


def _mooncake(rows: Sequence[Row]) -> list[str]:
    return [
        f'{{"timestamp": {number(t, 10**6)}, "input_length": {p}, "output_length": {o}, "hash_ids": [0, {p}]}}'
        for t, p, o in rows
    ]


def _bailian(rows: Sequence[Row]) -> list[str]:
    return [
        f'{{"chat_id": {n}, "parent_chat_id": -1, "timestamp": {number(t, 10**9)}, "input_length": {p}, '
        f'"output_length": {o}, "type": "text", "turn": 1, "hash_ids": [1, 2]}}'
        for n, (t, p, o) in enumerate(rows)
    ]


def _ragpulse(rows: Sequence[Row]) -> list[str]:
    hashes = {"sys_prompt": [8325], "passages_ids": [6123, 7239], "history": [], "user_input": [23648]}
    return [
        json.dumps(
            {
                "timestamp": str(t // 10**9),
                "input_length": p,
                "output_length": o,
                "hash_ids": hashes,
                "session_id": "1758081660427-xa8rbsd2uco1",
            }
        )
        for t, p, o in rows
    ]


def _aibrix(prompt_key: str, output_key: str) -> Callable[[Sequence[Row]], list[str]]:
    def lines(rows: Sequence[Row]) -> list[str]:
        instants: dict[int, list[dict[str, object]]] = {}
        for t, p, o in rows:
            instants.setdefault(t, []).append({"prompt": "…", prompt_key: p, output_key: o})
        return [json.dumps({"timestamp": t // 10**6, "requests": requests}) for t, requests in instants.items()]

    return lines


WRITERS: dict[str, Written] = {
    "azure 2023": Written("azure", 100, _azure_2023),
    "azure 2024": Written("azure", 1000, _azure_2024),
    "azure 2025": Written("azure", 1000, _azure_2025),
    "burstgpt 1": Written("burstgpt", 10**9, _burstgpt_1),
    "burstgpt 3": Written("burstgpt", 1, _burstgpt_3),
    "vidur": Written("vidur", 1, _vidur),
    "splitwise": Written("splitwise", 1, _splitwise),
    "mooncake": Written("mooncake", 1, _mooncake),
    "bailian": Written("bailian", 1, _bailian),
    "ragpulse": Written("ragpulse", 10**9, _ragpulse),
    "aibrix": Written("aibrix", 10**6, _aibrix("prompt_length", "output_length")),
    "aibrix, older": Written("aibrix", 10**6, _aibrix("Prompt Length", "Output Length")),
}

"""Writing TOML: what `tomllib` reads back as it was. Tables at the top, inline tables within them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import msgspec

_BARE = re.compile(r"\A[A-Za-z0-9_-]+\Z")


def document(data: Mapping[str, object]) -> str:
    """A TOML document of strings, numbers, booleans, lists and dicts; ValueError for what TOML has not."""
    plain, tables = [], []
    for key, value in data.items():
        if isinstance(value, Mapping):
            tables.append("\n".join([f"[{_key(key)}]", *_lines(value)]))
        elif _are_tables(value):
            tables += ["\n".join([f"[[{_key(key)}]]", *_lines(entry)]) for entry in value]  # type: ignore[attr-defined]
        else:
            plain.append(f"{_key(key)} = {_value(value)}")
    return "\n\n".join(["\n".join(plain), *tables] if plain else tables) + "\n"


def _lines(table: Mapping[str, object]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items()]


def _are_tables(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not written")
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return f"{{ {', '.join(_lines(value))} }}" if value else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    raise ValueError(f"TOML has no {type(value).__name__}")


def _key(key: str) -> str:
    return key if _BARE.match(key) else _text(key)


def _text(value: str) -> str:
    """A basic string: those of JSON are ones, but for DEL, which TOML wants escaped."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")

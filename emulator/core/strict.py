"""Strict conversion of parsed TOML or JSON into specs, with errors that name the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.quantities import QUANTITIES, BitsPerSecond, Bytes

T = TypeVar("T")

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>\$[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<key>[^`]*)`")


def convert(data: object, kind: type[T], where: str) -> T:
    """Convert builtins to `kind`; raises ConfigError naming `where` (a file), the key and what is allowed."""
    if found := _not_finite(data).removeprefix("."):
        raise ConfigError(f"{where}: {found}: a number must be finite")
    try:
        return msgspec.convert(data, kind, dec_hook=_parse_quantity)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error, data, kind)}") from None


def to_builtins(value: object) -> Any:
    """The inverse of `convert`: only dicts, lists, strings, numbers."""
    return msgspec.to_builtins(value, enc_hook=_write_quantity)


def _not_finite(data: object) -> str:
    """The path and value of a number that is infinite or not one (TOML has both), or nothing."""
    if isinstance(data, float) and not math.isfinite(data):
        return f" = {data}"
    steps: Iterable[tuple[object, object]] = ()
    if isinstance(data, dict):
        steps = ((f".{key}", value) for key, value in data.items())
    elif isinstance(data, list):
        steps = ((f"[{index}]", value) for index, value in enumerate(data))
    return next((f"{step}{below}" for step, value in steps if (below := _not_finite(value))), "")


def _parse_quantity(kind: type, value: object) -> object:
    if kind not in QUANTITIES:
        raise TypeError(f"cannot read a {kind.__name__}")
    if not isinstance(value, str):
        raise ValueError(f"{value!r} has no unit: write it as text, such as {_example(kind)}")
    try:
        return kind.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _example(kind: type) -> str:
    return '"10Gbps"' if kind is BitsPerSecond else '"64MiB"' if kind is Bytes else '"20s"'


def _write_quantity(value: object) -> str:
    if isinstance(value, QUANTITIES):
        unit = {BitsPerSecond: "bps", Bytes: "B"}.get(type(value), "s")
        return f"{float(value)!r}{unit}"
    raise TypeError(f"cannot write a {type(value).__name__}")


def _explain(error: msgspec.ValidationError, data: object, kind: type) -> str:
    match = _PATH.match(str(error))
    assert match is not None
    what, path = match["what"], match["path"] or "$"
    steps = [int(s) if s.isdigit() else s for s in re.findall(r"[^.\[\]$]+", path)]
    place = path.removeprefix("$").removeprefix(".") or "top level"
    if unknown := _UNKNOWN.search(what):
        key = unknown["key"]
        allowed = _allowed_keys(kind, steps, data)
        near = difflib.get_close_matches(key, allowed, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{place}: unknown key {key!r}{hint}; allowed: {', '.join(allowed)}"
    if missing := _MISSING.search(what):
        return f"{place}: key {missing['key']!r} is missing"
    value = _value_at(data, steps)
    shown = "" if isinstance(value, dict | list) else f" = {value!r}"
    return f"{place}{shown}: {what[:1].lower()}{what[1:]}{_choices(kind, steps, data)}"


def _choices(kind: type, steps: list[int | str], data: object) -> str:
    """What a Literal or a tag at the place allows, for messages that do not say it themselves."""
    target = _type_at(kind, steps, data)
    values = [v for part in _flatten(target) for v in get_args(part) if isinstance(v, str | int)]
    if not values and steps:
        parent = _type_at(kind, steps[:-1], data)
        tagged = [s for s in _flatten(parent) if _tag_field(s) == steps[-1]]
        values = [s.__struct_config__.tag for s in tagged]  # type: ignore[attr-defined]
    return f"; allowed: {', '.join(map(str, values))}" if values else ""


def _tag_field(kind: object) -> str | None:
    config = getattr(kind, "__struct_config__", None)
    return config.tag_field if config is not None else None


def _allowed_keys(kind: type, steps: list[int | str], data: object) -> list[str]:
    structs = _flatten(_type_at(kind, steps, data))
    value = _value_at(data, steps)
    keys: list[str] = []
    for struct in structs:
        config = getattr(struct, "__struct_config__", None)
        if config is None:
            continue
        if config.tag_field and isinstance(value, dict) and value.get(config.tag_field) != config.tag:
            continue
        keys += [k for k in ([config.tag_field] if config.tag_field else []) if k not in keys]
        keys += [f for f in struct.__struct_fields__ if f not in keys]  # type: ignore[attr-defined]
    return keys


def _type_at(kind: object, steps: list[int | str], data: object) -> object:
    """The declared type at a path; where a union stands on the way, the member that the data's tag names."""
    for step in steps:
        options = _flatten(kind)
        if isinstance(data, dict):
            tagged = [s for s in options if (t := _tag_field(s)) and data.get(t) == s.__struct_config__.tag]  # type: ignore[attr-defined]
            options = tagged or options
        following: list[object] = []
        for option in options:
            if isinstance(step, int) or step == "...":
                following += [a for a in get_args(option) if a is not Ellipsis]
            elif hasattr(option, "__struct_fields__") and step in option.__struct_fields__:
                following.append(get_type_hints(option, include_extras=True)[step])
        kind = Union[tuple(following)] if following else object  # noqa: UP007 - built at run time
        data = _value_at(data, [step])
    return kind


def _flatten(kind: object) -> list[object]:
    origin = get_origin(kind)
    if origin is Annotated:
        return _flatten(get_args(kind)[0])
    if origin in (Union, UnionType):
        return [part for arg in get_args(kind) for part in _flatten(arg)]
    return [kind]


def _value_at(data: object, steps: list[int | str]) -> object:
    for step in steps:
        try:
            data = data[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return data

"""A three-term profile fitted to a user's own measurements.

    prefill ms = base + per_token × Σn + per_token2 × Σ((context + n)² - context²)
    decode ms  = base + per_context_token × Σcontext + per_sequence × batch

Least squares of the relative error, since steps span two orders of magnitude and a decode step of 5 ms matters as much
as a prefill of 500. No term may be negative: a step takes no less for more work. With three terms the best fit under
that condition is found by trying each set of terms.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from emulator.core.errors import ConfigError
from emulator.core.hardware import DecodeFit, FittedProfile

Phase = Literal["prefill", "decode"]
Floats = npt.NDArray[np.float64]

COLUMNS = ("phase", "tokens", "batch", "ms")
OPTIONAL_COLUMNS = ("context", "model", "gpu", "tp")
LEAST_ROWS = 3


class Measurement(NamedTuple):
    """One measured step, from a line of the user's file.

    prefill: `batch` prompts of `tokens` each, of which `context` tokens had been computed before; decode: `batch`
    sequences that attend to `context` tokens each.
    """

    line: int
    phase: Phase
    tokens: int
    batch: int
    context: int
    ms: float

    @property
    def terms(self) -> tuple[float, float, float]:
        """What the three coefficients are multiplied with."""
        if self.phase == "decode":
            return 1.0, float(self.batch * self.context), float(self.batch)
        return 1.0, float(self.batch * self.tokens), float(self.batch * self.tokens * (self.tokens + 2 * self.context))


class RowError(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement beside what the fit makes of it; `error` is fitted over measured, less 1."""

    line: int
    phase: Phase
    tokens: int
    batch: int
    context: int
    ms: float
    fitted_ms: float
    error: float


class PhaseError(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of the absolute errors of a phase, and its worst with its sign."""

    rows: int
    mean: float
    worst: float


class ProfileFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted profile and how far it is from each measurement."""

    profile: FittedProfile
    prefill: PhaseError
    decode: PhaseError
    rows: tuple[RowError, ...]


class Measurements(NamedTuple):
    """A file of measurements, and what they are of where it says so."""

    rows: list[Measurement]
    of: dict[str, str]


def parse_measurements(text: str, where: str) -> Measurements:
    """Read a CSV file of measurements; raises ConfigError with the line for what makes no sense.

    Columns are phase, tokens, batch and ms. Tokens are those of each prompt of a prefill, and what each sequence of a
    decode step attends to. A column context may hold the latter instead, and for prefills what had been computed of
    each prompt before. Columns model, gpu and tp hold the same in every row.
    """
    rows = csv.DictReader(text.lstrip("\ufeff").splitlines(), strict=True)
    try:
        columns = [name.strip() for name in rows.fieldnames or ()]
        _check_columns(columns, where)
        rows.fieldnames = columns
        found, of = [], dict[str, str]()
        for row in rows:
            at = f"{where}: line {rows.line_num}"
            if None in row or None in row.values():
                raise ConfigError(f"{at}: a row has {len(columns)} values, as the first line has")
            cells = {key: value.strip() for key, value in row.items()}
            for key in ("model", "gpu", "tp"):
                if key in cells and of.setdefault(key, cells[key]) != cells[key]:
                    raise ConfigError(f"{at}: {key} = {cells[key]!r}: a profile is of one {key}, so far {of[key]!r}")
            found.append(_measurement(cells, rows.line_num, at))
    except csv.Error as error:
        raise ConfigError(f"{where}: line {rows.line_num}: {error}") from None
    return Measurements(found, of)


def _check_columns(columns: Sequence[str], where: str) -> None:
    missing = [name for name in COLUMNS if name not in columns]
    unknown = [name for name in columns if name not in COLUMNS + OPTIONAL_COLUMNS]
    if missing or unknown or len(set(columns)) < len(columns):
        raise ConfigError(
            f"{where}: line 1: must name the columns {', '.join(COLUMNS)} and may name {', '.join(OPTIONAL_COLUMNS)}, "
            f"each once; got {', '.join(columns) or 'nothing'}"
        )


def fit(measurements: Sequence[Measurement], *, where: str, name: str, model: str, gpu: str, tp: int) -> ProfileFit:
    """Fit both phases; raises ConfigError where there is too little to tell the terms apart."""
    by_phase = {phase: [m for m in measurements if m.phase == phase] for phase in ("prefill", "decode")}
    prefill = _coefficients(by_phase["prefill"], where, "prefill", "numbers of tokens")
    decode = _coefficients(by_phase["decode"], where, "decode", "contexts and batches")
    rows = tuple(_row_error(m, prefill if m.phase == "prefill" else decode) for m in measurements)
    of_prefill, of_decode = (_phase_error([r for r in rows if r.phase == phase]) for phase in ("prefill", "decode"))
    profile = FittedProfile(
        name=name,
        model=model,
        gpu=gpu,
        tp=tp,
        prefill_base_ms=prefill[0],
        prefill_per_token_ms=prefill[1],
        prefill_per_token2_ms=prefill[2],
        decode=DecodeFit(base_ms=decode[0], per_context_token_ms=decode[1], per_sequence_ms=decode[2]),
        source=(
            f"three-term fit to {len(rows)} measurements of {where}; mean error prefill {of_prefill.mean:.1%}, "
            f"decode {of_decode.mean:.1%}"
        ),
    )
    return ProfileFit(profile=profile, prefill=of_prefill, decode=of_decode, rows=rows)


def to_toml(profile: FittedProfile) -> str:
    """The profile as an entry of a topology file or of the catalog."""

    def text(value: str) -> str:
        return msgspec.json.encode(value).decode()

    decode = ", ".join(f"{key} = {value!r}" for key, value in msgspec.to_builtins(profile.decode).items())
    keys = ("prefill_base_ms", "prefill_per_token_ms", "prefill_per_token2_ms")
    lines = ["[[profiles]]", *(f"{key} = {text(getattr(profile, key))}" for key in ("name", "model", "gpu"))]
    lines += [f"tp = {profile.tp}", *(f"{key} = {getattr(profile, key)!r}" for key in keys)]
    return "\n".join([*lines, f"decode = {{ {decode} }}", f"source = {text(profile.source)}", ""])


# --- one row ------------------------------------------------------------------------------------------------------


def _measurement(cells: dict[str, str], line: int, where: str) -> Measurement:
    phase, context = cells["phase"], cells.get("context", "")
    ms = _number(cells["ms"], where)
    batch = _count(cells["batch"], "batch", 1, where)
    if phase == "prefill":
        tokens = _count(cells["tokens"], "tokens", 1, where)
        return Measurement(line, "prefill", tokens, batch, _count(context or "0", "context", 0, where), ms)
    if phase != "decode":
        raise ConfigError(f"{where}: phase = {phase!r}: must be prefill or decode")
    if context in ("", "0"):
        return Measurement(line, "decode", 1, batch, _count(cells["tokens"], "tokens", 0, where), ms)
    if cells["tokens"] not in ("", "0", "1"):
        raise ConfigError(
            f"{where}: tokens = {cells['tokens']!r} and context = {context!r}: a decode step computes one token a "
            "sequence; give what each attends to as either, and leave the other empty"
        )
    return Measurement(line, "decode", 1, batch, _count(context, "context", 0, where), ms)


def _count(text: str, key: str, least: int, where: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(f"{where}: {key} = {text!r}: must be a whole number of at least {least}")
    return int(text)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{where}: ms = {text!r}: must be a number above 0")
    return value


# --- least squares --------------------------------------------------------------------------------------------


def _coefficients(rows: Sequence[Measurement], where: str, phase: str, what: str) -> tuple[float, float, float]:
    if len(rows) < LEAST_ROWS:
        raise ConfigError(f"{where}: {len(rows)} {phase} rows; three terms need at least {LEAST_ROWS}")
    ms = np.array([row.ms for row in rows])
    relative = np.array([row.terms for row in rows]) / ms[:, None]
    size = np.linalg.norm(relative, axis=0)
    size[size == 0] = 1.0
    scaled = relative / size
    if np.linalg.matrix_rank(scaled, tol=1e-9) < len(size):
        raise ConfigError(
            f"{where}: the {phase} rows do not tell three terms apart: measure at least {LEAST_ROWS} different {what}"
        )
    base, per_size, last = (float(value) for value in _least_squares(scaled, np.ones(len(rows))) / size)
    return base, per_size, last


def _least_squares(matrix: Floats, target: Floats) -> Floats:
    """The coefficients of the least squared error among those that are not negative."""
    best = np.zeros(matrix.shape[1])
    least = float(target @ target)
    for count in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), count):
            columns = list(chosen)
            found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            left = matrix[:, columns] @ found - target
            if np.all(found >= 0) and float(left @ left) < least:
                least = float(left @ left)
                best = np.zeros(matrix.shape[1])
                best[columns] = found
    return best


def _row_error(row: Measurement, coefficients: tuple[float, float, float]) -> RowError:
    fitted_ms = sum(factor * term for factor, term in zip(coefficients, row.terms, strict=True))
    return RowError(**row._asdict(), fitted_ms=fitted_ms, error=fitted_ms / row.ms - 1)


def _phase_error(rows: Sequence[RowError]) -> PhaseError:
    errors = [row.error for row in rows]
    return PhaseError(rows=len(errors), mean=sum(map(abs, errors)) / len(errors), worst=max(errors, key=abs))

"""The file that `pdemu calibrate` writes and a run reads: the thin I/O beside the format in the core."""

from __future__ import annotations

from pathlib import Path

from emulator.core.calibration import Calibration, parse, to_toml
from emulator.core.errors import ConfigError


def read_calibration(path: Path) -> Calibration:
    """Read a file that `pdemu calibrate` wrote; raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"calibration {path}: cannot be read: {what}; give a file of `pdemu calibrate`") from None
    return parse(text, f"calibration {path}")


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(to_toml(calibration), encoding="utf-8")
    partial.replace(path)

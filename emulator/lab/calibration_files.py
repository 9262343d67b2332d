"""The file that `pdemu calibrate` writes and a run reads: the thin I/O beside the format in the core."""

from __future__ import annotations

import os
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


def check_writable(path: Path) -> None:
    """Find out before measuring whether the file can be written, which is left as it is; raises ConfigError."""
    target = _target(path)
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise ConfigError(f"--out {path}: is not a regular file; give the name of one")
    if not target.parent.is_dir():
        raise ConfigError(f"--out {path}: cannot be written; give a file in a folder that exists")
    try:
        if target.exists():
            target.open("ab").close()
        _partial(target).touch()
        _partial(target).unlink()
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error.strerror}); give another file") from None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file, or what a link by this name leads to, whole or not at all."""
    target = _target(path)
    partial = _partial(target)
    try:
        partial.write_text(to_toml(calibration), encoding="utf-8")
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _target(path: Path) -> Path:
    """What links lead to; a link still where they lead in a circle."""
    return Path(os.path.realpath(path))


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")

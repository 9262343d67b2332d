"""This machine's processor as a device: what it is, in words, and by what processes on it know that they share it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MODEL = re.compile(r"^(?:model name|Model|cpu model|Processor)\s*:\s*(\S.*)$", re.MULTILINE)


def processor_name() -> str:
    """Model and cores, as `AMD EPYC 9654, 96 cores`; the machine's name is not in it."""
    try:
        found = _MODEL.search(_CPUINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    model = found[1].strip() if found else platform.processor() or platform.machine() or "processor"
    cores = os.cpu_count() or 1
    return f"{model}, {cores} core{'s' if cores > 1 else ''}"


def processor_id() -> str:
    """The same for all processes of this machine, in containers too, and another one on every machine."""
    try:
        name = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        name = hashlib.blake2s(platform.node().encode(), digest_size=16).hexdigest()
    return f"cpu:{name}"

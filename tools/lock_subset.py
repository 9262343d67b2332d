"""Print the part of requirements.lock that some packages need, hashes included: by default the project's own
dependencies, without what development adds; or of the packages named.

    python tools/lock_subset.py [PACKAGE ...] > runtime.lock
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_VIA = re.compile(r"^    #(?: via|  ) +([A-Za-z0-9._-]+)", re.MULTILINE)


def normal(name: str) -> str:
    """A package's name in the one spelling that all others equal."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", name, maxsplit=1)[0]).lower()


def subset(lock: str, roots: set[str]) -> str:
    """The entries of a lock file that are in `roots`, or there because of them."""
    entries = {normal(entry): entry for entry in re.split(r"^(?=[a-z])", lock, flags=re.MULTILINE)[1:]}
    needed = {normal(root) for root in roots}
    if missing := needed - entries.keys():
        raise SystemExit(f"lock_subset: not in requirements.lock: {', '.join(sorted(missing))}")
    while more := {n for n, e in entries.items() if n not in needed and needed & set(map(normal, _VIA.findall(e)))}:
        needed |= more
    return "".join(entry for name, entry in entries.items() if name in needed)


if __name__ == "__main__":
    asked = set(sys.argv[1:])
    if not asked:
        asked = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
    sys.stdout.write(subset((ROOT / "requirements.lock").read_text(encoding="utf-8"), asked))

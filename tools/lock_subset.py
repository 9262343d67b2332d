"""Print the part of a lock file that some packages need, hashes included: by default the project's own dependencies,
without what development adds; or of the packages named.

    python tools/lock_subset.py [--lock requirements-cuda12.lock] [PACKAGE ...] > runtime.lock
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_VIA = re.compile(r"^    #(?: via|  ) +([A-Za-z0-9._-]+)", re.MULTILINE)


def normal(name: str) -> str:
    """A package's name in the one spelling that all others equal."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", name, maxsplit=1)[0]).lower()


def subset(lock: str, roots: set[str], name: str = "requirements.lock") -> str:
    """The entries of the lock file `name` that are in `roots`, or there because of them."""
    entries = {normal(entry): entry for entry in re.split(r"^(?=[a-z])", lock, flags=re.MULTILINE)[1:]}
    needed = {normal(root) for root in roots}
    if missing := needed - entries.keys():
        raise SystemExit(f"lock_subset: not in {name}: {', '.join(sorted(missing))}")
    while more := {n for n, e in entries.items() if n not in needed and needed & set(map(normal, _VIA.findall(e)))}:
        needed |= more
    return "".join(entry for package, entry in entries.items() if package in needed)


def main() -> None:
    """Read the command line and print."""
    parser = argparse.ArgumentParser(description="Print the part of a lock file that some packages need.")
    parser.add_argument("--lock", default="requirements.lock", help="a lock file at the root")
    parser.add_argument("package", nargs="*")
    arguments = parser.parse_args()
    roots = set(arguments.package)
    if not roots:
        roots = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
    sys.stdout.write(subset((ROOT / arguments.lock).read_text(encoding="utf-8"), roots, arguments.lock))


if __name__ == "__main__":
    main()

"""`python -m emulator` is `pdemu`. The command is imported here, so that Ctrl-C during its import is answered too."""

from __future__ import annotations

import os
import sys

from emulator.cli.dropped import heed_dropped

SINGLE_THREADED = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
"""Small products are slower on many threads, which spin for one another; it counts before NumPy is imported."""


def main() -> None:
    """Run the command line."""
    for name in SINGLE_THREADED:
        os.environ.setdefault(name, "1")
    heed_dropped()
    try:
        from emulator.cli.main import main as run  # noqa: PLC0415 - see above
    except KeyboardInterrupt:
        sys.stderr.write("pdemu: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

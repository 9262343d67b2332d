"""`python -m emulator` is `pdemu`. The command is imported here, so that Ctrl-C during its import is answered too."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from emulator.cli.main import main as run  # noqa: PLC0415 - see above
    except KeyboardInterrupt:
        sys.stderr.write("pdemu: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

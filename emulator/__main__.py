"""`python -m emulator` is `pdemu`."""

from emulator.cli import main

main()

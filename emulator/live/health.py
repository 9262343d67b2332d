"""Whether a member of a cluster is well: `python -m emulator.live.health` for the health check of its container.

A member writes down what can be seen of it from outside once it is ready: the ports that answer, and the address whose
interface it has shaped. Checking costs a new interpreter, so only what is needed is imported.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

FILE_ENV = "PDEMU_HEALTH_FILE"
CONNECT_S = 2.0


def write(ports: Sequence[str], shaped_address: str) -> None:
    """Note that this member is ready: `ports` as `tcp://address:port`; `shaped_address` is empty where nothing is.

    Does nothing unless the environment names the file.
    """
    if path := os.environ.get(FILE_ENV):
        Path(path).write_text(json.dumps({"ports": list(ports), "shaped_address": shaped_address}), encoding="ascii")


def problem() -> str | None:
    """What is wrong with the member that wrote the file; None when it is well."""
    path = Path(os.environ.get(FILE_ENV, ""))
    try:
        noted = json.loads(path.read_text(encoding="ascii"))
    except OSError:
        return f"not ready: there is no file {path} ({FILE_ENV})"
    for endpoint in noted["ports"]:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            return f"{endpoint} does not answer: {error}"
    address = noted["shaped_address"]
    if address:
        from emulator.live import shaping  # noqa: PLC0415 - slow to load, and not every member shapes

        held = shaping.find(address)
        if held is None or held.plan.egress is None or held.plan.ingress is None:
            return f"the interface of {address} is not shaped in both directions"
    return None


if __name__ == "__main__":
    found = problem()
    sys.stdout.write(f"{found or 'ready'}\n")
    sys.exit(1 if found else 0)

"""Small programs that test processes run inside network namespaces; their arguments are in `sys.argv`."""

from __future__ import annotations

INSIDE = """
import json, os, socket, sys
from emulator.live.namespace import enter
enter(sys.argv[1])
"""
SERVE = (
    INSIDE
    + """
with socket.create_server((sys.argv[2], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, peer = server.accept()
    with connection:
        connection.sendall(connection.recv(100) + peer[0].encode())
"""
)
CALL = (
    INSIDE
    + """
with socket.create_connection((sys.argv[2], int(sys.argv[3])), timeout=10) as connection:
    connection.sendall(sys.argv[4].encode())
    sys.stdout.write(connection.recv(100).decode())
"""
)

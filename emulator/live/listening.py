"""The socket that an endpoint listens on, made before anything starts: a port that is taken is a user's error."""

from __future__ import annotations

import socket

from emulator.core.errors import ConfigError
from emulator.core.listen import Listen

BACKLOG = 4096


def listening_socket(service: Listen) -> socket.socket:
    """A socket that listens where the service is to be; raises ConfigError when it cannot."""
    family = socket.AF_INET6 if ":" in service.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((service.host, service.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--http {service}: cannot listen there ({error.strerror}); give a free port, or 0 for any"
        ) from None
    return listening

"""Network namespaces by name: a process moves into its own before it opens a socket, and the lab takes them away.

pyroute2 is imported where it is used: it costs a quarter of a second, and only runs in namespaces need it.
"""

from __future__ import annotations

from pathlib import Path

from emulator.core.errors import ConfigError, RunError

FOLDER = Path("/var/run/netns")
"""Where the kernel's namespaces have their names, as `ip netns` and pyroute2 keep them."""


def enter(netns_name: str) -> None:
    """Move the calling thread into a namespace; threads started and sockets opened afterwards are in it too.

    Call it before anything starts a thread or opens a socket. Raises RunError where there is no such namespace,
    ConfigError where entering it is not permitted.
    """
    from pyroute2 import netns  # noqa: PLC0415 - see above

    try:
        netns.setns(netns_name, flags=0)
    except FileNotFoundError:
        raise RunError(f"network namespace {netns_name} is gone; was its run ended, or `pdemu clean` run?") from None
    except PermissionError:
        raise ConfigError(f"network namespace {netns_name}: entering it needs CAP_SYS_ADMIN") from None


def exists(netns_name: str) -> bool:
    """Whether a namespace of that name is there."""
    return (FOLDER / netns_name).exists()


def remove(netns_name: str) -> bool:
    """Take a namespace away, with every interface in it; False when there was none. Raises OSError if refused.

    The kernel does the work in the background: interfaces are gone a moment later, or when the last process in the
    namespace ends.
    """
    from pyroute2 import netns  # noqa: PLC0415 - see above

    try:
        netns.remove(netns_name)
    except FileNotFoundError:
        return False
    return True

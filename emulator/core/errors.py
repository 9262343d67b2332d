"""The errors a user can cause. Each message says what is wrong, where, and what would be right."""

from __future__ import annotations


class PdemuError(Exception):
    """An error shown to the user as one line; the command ends with `exit_code`."""

    exit_code = 2


class ConfigError(PdemuError):
    """A topology, option or file that cannot be used as it is."""


class NotReadyError(ConfigError):
    """A server that cannot be used, or not yet."""


class CapacityError(PdemuError):
    """Something does not fit: weights, a prompt, KV memory, host memory."""


class ProtocolError(PdemuError):
    """A peer sent what the protocol does not allow."""


class DeadlineError(PdemuError):
    """A process or a request did not do in time what it had to."""

    exit_code = 1


class FidelityError(PdemuError):
    """The emulation was not faithful, so its result is withheld."""


class RunError(PdemuError):
    """A run that was asked for correctly has broken down: a process died or did not answer."""

    exit_code = 1

"""The errors a user can cause. Each message says what is wrong, where, and what would be right."""

from __future__ import annotations


class PdemuError(Exception):
    """An error shown to the user as one line; the command ends with exit status 2."""


class ConfigError(PdemuError):
    """A topology, option or file that cannot be used as it is."""


class CapacityError(PdemuError):
    """Something does not fit: weights, a prompt, KV memory, host memory."""


class ProtocolError(PdemuError):
    """A peer sent what the protocol does not allow."""


class DeadlineError(PdemuError):
    """A process or a request did not do in time what it had to."""


class FidelityError(PdemuError):
    """The emulation was not faithful, so its result is withheld."""

"""Where a process serves HTTP."""

from __future__ import annotations

import ipaddress

import msgspec

from emulator.core.errors import ConfigError

MOST_PORT = 65535


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An IP address of this machine and a port, 0 for any free one."""

    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def parse(cls, text: str, option: str) -> Listen:
        """From ADDRESS:PORT, `localhost` included; raises ConfigError, which names the option, for anything else."""
        host, colon, port = text.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            host = ""
        if not (host and colon and port.isdecimal() and int(port) <= MOST_PORT):
            raise ConfigError(f"{option} {text}: must be ADDRESS:PORT, such as 127.0.0.1:8000")
        return cls(host=host, port=int(port))

    @classmethod
    def parse_metrics(cls, text: str, *, insecure: bool) -> Listen:
        """What `--metrics` says; raises ConfigError, too, for an address beyond loopback unless that is `insecure`."""
        where = cls.parse(text, "--metrics")
        if not where.loopback and not insecure:
            raise ConfigError(
                f"--metrics {text}: beyond loopback others could read them, and they have no key; give --insecure on a "
                "network that nobody else reaches"
            )
        return where

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether nobody but this machine reaches it."""
        return ipaddress.ip_address(self.host).is_loopback

    def following(self, n: int) -> Listen:
        """The n-th address after this one: port by port, or any free one again. Raises ConfigError beyond the last."""
        port = self.port + n if self.port else 0
        if port > MOST_PORT:
            raise ConfigError(f"--metrics {self}: no {n} ports come after it; give a lower one, or 0 for free ones")
        return msgspec.structs.replace(self, port=port)

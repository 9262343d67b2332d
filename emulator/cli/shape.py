"""`pdemu shape` and `pdemu unshape`: the kernel's shaping by hand, for a lab over real machines."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Annotated

import typer

from emulator.core.errors import ConfigError
from emulator.core.quantities import BitsPerSecond, Seconds
from emulator.core.shaping import ShapePlan, line_rate_bps
from emulator.core.specs import RateBasis

To = Annotated[
    str,
    typer.Option("--to", metavar="ADDRESS", help="An address of the KV network: a peer's, or this host's own there."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(shape)
    app.command()(unshape)


def shape(
    *,
    to: To,
    rate: Annotated[str, typer.Option("--rate", metavar="RATE", help="Bandwidth in each direction, such as 10Gbps.")],
    delay: Annotated[str, typer.Option("--delay", metavar="TIME", help="One-way delay to add, such as 50us.")] = "0s",
    jitter: Annotated[str, typer.Option("--jitter", metavar="TIME", help="The delay varies by ± TIME.")] = "0s",
    rate_basis: Annotated[
        RateBasis, typer.Option("--rate-basis", help="line: RATE is the line's; payload: TCP's payload in it.")
    ] = "line",
) -> None:
    """Shape the interface towards ADDRESS in both directions, verify it, and print the equivalent commands."""
    from emulator.live import shaping  # noqa: PLC0415 - Linux only, and pyroute2 is slow to load

    line_bps = line_rate_bps(_parsed("--rate", BitsPerSecond.parse, rate), rate_basis)
    delay_s = _parsed("--delay", Seconds.parse, delay)
    jitter_s = _parsed("--jitter", Seconds.parse, jitter)
    plan = ShapePlan(local_address(to), line_bps, line_bps, delay_s, jitter_s)
    applied = shaping.apply(plan)
    typer.echo(f"{applied.interface} ({plan.address}): {BitsPerSecond(line_bps)} each way, verified. The same by hand:")
    for command in applied.commands:
        typer.echo(f"  {command}")
    if applied.delay_by == "receiver":
        typer.echo("This kernel has no netem, so the delay is not in place: pdemu's receivers hold frames instead.")


def unshape(*, to: To) -> None:
    """Take back what `pdemu shape` has set on the interface towards ADDRESS."""
    from emulator.live import shaping  # noqa: PLC0415 - Linux only, and pyroute2 is slow to load

    applied = shaping.find(local_address(to))
    if applied is None:
        typer.echo("nothing to take back")
        return
    shaping.undo(applied)
    typer.echo(f"{applied.interface}: no longer shaped. The same by hand:")
    for command in applied.undo_commands:
        typer.echo(f"  {command}")


def local_address(peer: str) -> str:
    """This host's address on the way to `peer`; raises ConfigError for what is no address or cannot be reached."""
    try:
        family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket: this looks the route up and sends nothing
            return str(probe.getsockname()[0])
    except socket.gaierror:
        raise ConfigError(f"--to {peer}: is not an IP address, such as 10.0.0.2") from None
    except OSError as error:
        raise ConfigError(
            f"--to {peer}: there is no route to it ({error.strerror}); give an address that is reached"
        ) from None


def _parsed(option: str, parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None

"""Kernel shaping in real network namespaces: what is set, what it does to TCP, how it ends, and every refusal."""

from __future__ import annotations

import asyncio
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from emulator.core.errors import ConfigError, RunError
from emulator.core.pacing import payload_bits_per_s
from emulator.core.shaping import ShapePlan, ShapingError
from tests.live.lab import eventually, skip_unless
from tests.live.namespaces import Host, cable

if sys.platform == "linux":
    from emulator.live import shaping

pytestmark = pytest.mark.netns

TRANSFER_BYTES = 10_000_000


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with cable("t") as ends:
        yield ends


def state(host: Host) -> list[Any]:
    """Devices, queueing disciplines and connected routes in a namespace."""

    def look() -> list[Any]:
        from pyroute2 import IPRoute

        from emulator.live import interface

        with IPRoute() as ip:
            index, name = interface.interface_of(ip, host.address)
            links = sorted(link.get_attr("IFLA_IFNAME") for link in ip.get_links())
            kinds = sorted((q["index"], q.get_attr("TCA_KIND")) for q in ip.get_qdiscs())
            return [links, kinds, interface.connected_route(ip, host.address, index, name)]

    return host.run(look)


def transfer(sender: Host, receiver: Host, nbytes: int = TRANSFER_BYTES) -> tuple[float, str]:
    """Send over TCP; payload bits per second at the receiver, and the sender's congestion control."""
    ready: list[int] = []

    def take() -> float:
        with socket.create_server((receiver.address, 0)) as listener:
            ready.append(listener.getsockname()[1])
            connection, _ = listener.accept()
            with connection:
                buffer = bytearray(1 << 20)
                connection.recv_into(buffer, 1)
                start_s = time.monotonic()
                left = nbytes
                while left:
                    left -= connection.recv_into(buffer, min(left, len(buffer)))
                return nbytes * 8 / (time.monotonic() - start_s)

    def give() -> str:
        with socket.create_connection((receiver.address, ready[0])) as connection:
            congestion = shaping.congestion_of(connection)
            connection.sendall(bytes(nbytes + 1))
            connection.recv(1)
            return congestion

    taking = receiver.start(take)
    assert eventually(lambda: bool(ready)), "nobody listens"
    congestion = sender.run(give)
    return taking.result(60), congestion


def test_both_directions_are_read_back_from_the_kernel(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    plan = ShapePlan(host.address, egress_bps=1e9, ingress_bps=5e9)
    applied = host.run(shaping.apply, plan)
    host.run(shaping.verify, applied)
    assert applied.interface == host.interface
    assert applied.delay_by == "none"
    assert host.run(shaping.find, host.address) == applied


def test_rates_beyond_32_bits(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    plan = ShapePlan(host.address, egress_bps=100e9, ingress_bps=50e9)
    host.run(shaping.apply, plan)
    found = host.run(shaping.find, host.address)
    assert found is not None
    assert found.plan == plan


@pytest.mark.parametrize("shaped", ["egress", "ingress", "both"])
def test_tcp_gets_the_rate_with_cubic(hosts: tuple[Host, Host], shaped: str) -> None:
    sender, receiver = hosts
    rate_bps = 200e6
    egress = rate_bps if shaped != "ingress" else None
    ingress = rate_bps if shaped != "egress" else None
    applied: list[tuple[Host, shaping.Applied]] = []
    for host, plan in (
        (sender, ShapePlan(sender.address, egress_bps=egress, ingress_bps=10e9)),
        (receiver, ShapePlan(receiver.address, egress_bps=10e9, ingress_bps=ingress)),
    ):
        applied.append((host, host.run(shaping.apply, plan)))
    achieved_bps, congestion = zip(*(transfer(sender, receiver) for _ in range(3)), strict=True)
    assert statistics.median(achieved_bps) == pytest.approx(payload_bits_per_s(rate_bps, "line"), rel=0.04)
    assert set(congestion) == {"cubic"}
    sent, taken = (host.run(shaping.counters, what) for host, what in applied)
    for counts in (sent.egress, taken.ingress):
        if counts is not None:
            assert counts.bytes >= TRANSFER_BYTES * 1514 / 1448
            assert counts.drops == 0


def test_applying_again_replaces_and_undo_leaves_nothing(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    before = state(host)
    host.run(shaping.apply, ShapePlan(host.address, egress_bps=1e9, ingress_bps=1e9))
    applied = host.run(shaping.apply, ShapePlan(host.address, ingress_bps=2e9))
    found = host.run(shaping.find, host.address)
    assert found is not None
    assert found.plan == applied.plan
    for _ in range(2):
        host.run(shaping.undo, applied)
        assert state(host) == before
        assert host.run(shaping.find, host.address) is None


def test_undo_gives_the_route_its_own_congestion_control_back(hosts: tuple[Host, Host]) -> None:
    from pyroute2 import IPRoute

    from emulator.live import interface

    host, _ = hosts

    def prefer_reno() -> None:
        with IPRoute() as ip:
            index, name = interface.interface_of(ip, host.address)
            interface.set_congestion(ip, interface.connected_route(ip, host.address, index, name), "reno")

    host.run(prefer_reno)
    before = state(host)
    applied = host.run(shaping.apply, ShapePlan(host.address, egress_bps=1e9))
    assert applied.previous_congestion == "reno"
    host.run(shaping.undo, applied)
    assert state(host) == before


@pytest.mark.parametrize("address", ["10.99.0.1", "fd99::1"])
def test_printed_commands_do_the_same(hosts: tuple[Host, Host], address: str) -> None:
    skip_unless(shutil.which("tc") is not None and shutil.which("ip") is not None, "the commands ip and tc")
    host, _ = hosts
    applied = host.run(shaping.apply, ShapePlan(address, egress_bps=1e9, ingress_bps=50e9))
    host.run(shaping.undo, applied)
    before = state(host)

    def type_in(commands: list[str]) -> None:
        for command in commands:
            subprocess.run(["ip", "netns", "exec", host.namespace, *command.split()], check=True, timeout=10)

    type_in(applied.commands)
    host.run(shaping.verify, applied)
    type_in(applied.undo_commands)
    assert state(host) == before


def test_delay_is_the_kernels_or_left_to_the_receiver(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    applied = host.run(shaping.apply, ShapePlan(host.address, egress_bps=1e9, delay_s=5e-3, jitter_s=1e-3))
    assert applied.delay_by in ("kernel", "receiver")
    found = host.run(shaping.find, host.address)
    assert found is not None
    assert found.plan.delay_s == (5e-3 if applied.delay_by == "kernel" else 0)


def test_it_works_on_a_thread_whose_loop_runs(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts

    async def shape() -> shaping.Applied:
        return shaping.apply(ShapePlan(host.address, egress_bps=1e9))

    applied = host.run(lambda: asyncio.run(shape()))
    host.run(shaping.verify, applied)


def test_what_is_changed_or_removed_is_noticed(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    applied = host.run(shaping.apply, ShapePlan(host.address, egress_bps=1e9, ingress_bps=1e9))
    host.run(shaping.apply, ShapePlan(host.address, egress_bps=2e9, ingress_bps=1e9))
    with pytest.raises(ShapingError, match="not shaped as asked"):
        host.run(shaping.verify, applied)
    host.run(shaping.undo, applied)
    with pytest.raises(RunError, match="is gone"):
        host.run(shaping.counters, applied)


def test_an_address_that_is_not_here(hosts: tuple[Host, Host]) -> None:
    host, other = hosts
    with pytest.raises(ConfigError, match=rf"no interface .*{other.address}.*{host.address} \({host.interface}\)"):
        host.run(shaping.apply, ShapePlan(other.address, egress_bps=1e9))


def test_nothing_to_shape(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    with pytest.raises(ConfigError, match="give a rate"):
        host.run(shaping.apply, ShapePlan(host.address, delay_s=1e-3))


@pytest.mark.parametrize("direction", ["root", "ingress"])
def test_somebody_elses_shaping_stays(hosts: tuple[Host, Host], direction: str) -> None:
    host, _ = hosts

    def shape_otherwise() -> None:
        from pyroute2 import IPRoute

        with IPRoute() as ip:
            index = ip.link_lookup(ifname=host.interface)[0]
            if direction == "root":
                ip.tc("add", "pfifo", index, 0x10000, limit=100)
            else:
                ip.tc("add", "ingress", index)

    host.run(shape_otherwise)
    before = state(host)
    with pytest.raises(ShapingError, match="somebody else"):
        host.run(shaping.apply, ShapePlan(host.address, egress_bps=1e9, ingress_bps=1e9))
    assert state(host) == before


def test_a_step_that_fails_takes_all_back(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    before = state(host)
    plan = ShapePlan(host.address, egress_bps=1e9, ingress_bps=1e9, congestion_control="nosuch")
    with pytest.raises(ShapingError, match="tcp_nosuch"):
        host.run(shaping.apply, plan)
    assert state(host) == before


def test_values_that_the_kernel_changed_are_an_error(hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = hosts
    before = state(host)
    monkeypatch.setattr("emulator.live.qdisc.same_bucket", lambda held, asked: held is asked)
    with pytest.raises(ShapingError, match="not shaped as asked"):
        host.run(shaping.apply, ShapePlan(host.address, egress_bps=1e9, ingress_bps=1e9))
    assert state(host) == before


CHILD = """
import os, sys
from pyroute2 import IPRoute, netns
from emulator.core.shaping import ShapePlan
from emulator.live import shaping
IPRoute().close()
if sys.argv[1] == "nobody":
    netns.setns(sys.argv[2], flags=0)
    shaping.find("10.99.0.1")
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
else:
    with IPRoute() as ip:
        ip.link("add", ifname="va", kind="veth", peer="vb")
        index = ip.link_lookup(ifname="va")[0]
        ip.addr("add", index=index, address="10.99.0.1", prefixlen=24)
        for name in ("va", "vb"):
            ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")
try:
    shaping.verify(shaping.apply(ShapePlan("10.99.0.1", egress_bps=1e9, ingress_bps=1e9)))
    print("shaped")
except shaping.ShapingError as error:
    print(type(error).__name__, error)
"""


def test_without_permission_it_says_what_is_missing_and_the_two_ways_out(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    before = state(host)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, "nobody", host.namespace], check=False, capture_output=True, text=True, timeout=60
    )
    assert child.stdout.startswith("ShapingNotPermittedError"), child.stderr
    for words in ("CAP_NET_ADMIN in this network namespace", "--shaping paced", "--launcher netns", "unshare -Urn"):
        assert words in child.stdout
    assert state(host) == before


def test_a_user_namespace_of_ones_own_may_shape() -> None:
    skip_unless(shutil.which("unshare") is not None, "the command unshare")
    unshare = ["unshare", "-Urn"]
    allowed = subprocess.run([*unshare, "true"], check=False, capture_output=True, timeout=10).returncode == 0
    skip_unless(allowed, "user namespaces")
    child = subprocess.run(
        [*unshare, sys.executable, "-c", CHILD, "own"], check=False, capture_output=True, text=True, timeout=60
    )
    assert child.stdout == "shaped\n", child.stderr

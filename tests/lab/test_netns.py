"""Real network namespaces: what a site connects, what it leaves alone, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import emulator
from emulator.core.errors import ConfigError, RunError
from emulator.lab import netns as sites
from emulator.lab.leftovers import STATE_DIR_ENV, Ledger, clean, new_run_id, state_folder
from emulator.lab.netns import CONTROL_NETWORK, KV_NETWORK, NetnsSite, Place
from emulator.live import namespace
from tests.lab.inside import CALL, INSIDE, SERVE
from tests.live.lab import eventually

NODES = ("prefill-1", "prefill-2", "decode-1", "decode-2")
CHECKOUT = Path(emulator.__file__).parent.parent
MESSAGE = b"over the bridge"

LOOK = (
    INSIDE
    + """
import psutil
stats = {name: [s.isup, s.mtu] for name, s in psutil.net_if_stats().items()}
found = {name: [a.address for a in all if a.family == socket.AF_INET] for name, all in psutil.net_if_addrs().items()}
print(json.dumps([stats, found]))
"""
)
HOLD = """
import sys
from emulator.lab.leftovers import Ledger
from emulator.lab.netns import NetnsSite
ledger = Ledger.open(sys.argv[1])
NetnsSite(ledger.run_id, sys.argv[2:], ledger).open()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own, which child processes use too."""
    monkeypatch.setenv(STATE_DIR_ENV, str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    return state_folder()


@pytest.fixture
def site() -> Iterator[NetnsSite]:
    """A site that is not open yet; whatever the test does, it is closed."""
    ledger = Ledger.open(new_run_id("test"))
    made = NetnsSite(ledger.run_id, NODES, ledger)
    yield made
    made.close()
    ledger.close()


def names_of(site: NetnsSite) -> list[str]:
    """The namespaces of a site."""
    return [site.hub, *(place.netns for place in site.places.values())]


def child(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs a script."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def exchange(source: Place, target: Place, address: str) -> str:
    """Send the message from one place to an address of another; returns what comes back."""
    with child(SERVE, target.netns, address) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            call = [sys.executable, "-c", CALL, source.netns, address, port, MESSAGE.decode()]
            return subprocess.run(call, check=True, capture_output=True, text=True, timeout=30).stdout
        finally:
            server.kill()


def look(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and MTU, and the addresses, of every interface in a namespace."""
    run = subprocess.run([sys.executable, "-c", LOOK, name], check=True, capture_output=True, text=True, timeout=30)
    stats, addresses = json.loads(run.stdout)
    return stats, addresses


def host_view() -> tuple[str, set[str], set[str]]:
    """This thread's namespace, and its interfaces and those of its addresses that a site could have given."""
    links = {name for _, name in socket.if_nameindex()}
    addresses = {a.address for all_ in psutil.net_if_addrs().values() for a in all_ if a.family == socket.AF_INET}
    ranges = (str(CONTROL_NETWORK).rsplit(".", 2)[0], str(KV_NETWORK).rsplit(".", 2)[0])
    here = str(Path("/proc/thread-self/ns/net").readlink())
    return here, links, {a for a in addresses if a.startswith(ranges)}


# --- names, without privileges --------------------------------------------------------------------------------------


def test_names_are_derived_from_the_run_short_and_distinct() -> None:
    ledger = Ledger.open(new_run_id("x" * 100))
    nodes = [f"decode-{number}" for number in range(500)]
    site = NetnsSite(ledger.run_id, nodes, ledger)
    other = NetnsSite(new_run_id("x" * 100), nodes, ledger)
    ports = [site.port(name, network) for name in site.places for network in ("control", "kv")]
    assert max(len(name) for name in ports) <= 15
    assert len(set(ports)) == len(ports)
    assert not set(ports) & {other.port(name, "kv") for name in nodes}
    assert all(f"pdemu-{ledger.run_id}-" in name for name in names_of(site))
    assert len({place.control_address for place in site.places.values()}) == 502
    ledger.close()


# --- a site ---------------------------------------------------------------------------------------------------------


@pytest.mark.netns
def test_nodes_reach_each_other_on_both_networks(site: NetnsSite) -> None:
    places = site.open()
    assert list(places) == ["router", "client", *NODES]
    first, last = places[NODES[0]], places[NODES[-1]]
    assert last.kv_address is not None
    assert first.kv_address is not None
    assert exchange(first, last, last.kv_address) == MESSAGE.decode() + first.kv_address
    assert exchange(first, last, last.control_address) == MESSAGE.decode() + first.control_address
    assert exchange(places["client"], places["router"], places["router"].control_address).startswith(MESSAGE.decode())


@pytest.mark.netns
def test_a_namespace_has_loopback_control_and_for_nodes_kv(site: NetnsSite) -> None:
    places = site.open()
    stats, addresses = look(places["decode-1"].netns)
    kv, control = site.interface("kv"), site.interface("control")
    assert stats.keys() == {"lo", kv, control}
    assert stats["lo"][0]
    assert stats[kv] == stats[control] == [True, 1500]
    assert addresses[kv] == [places["decode-1"].kv_address]
    assert addresses[control] == [places["decode-1"].control_address]
    for name in ("router", "client"):
        assert places[name].kv_address is None
        assert look(places[name].netns)[0].keys() == {"lo", control}
    ports = {site.port(name, "control") for name in places} | {site.port(name, "kv") for name in NODES}
    stats, addresses = look(site.hub)
    assert stats.keys() == {"lo", kv, control} | ports
    assert all(up and mtu == 1500 for name, (up, mtu) in stats.items() if name != "lo")
    assert not any(addresses.get(name) for name in ports | {kv, control})


@pytest.mark.netns
def test_the_host_sees_nothing_and_nothing_stays(site: NetnsSite, state: Path) -> None:
    before = host_view()
    places = site.open()
    here, links, addresses = host_view()
    assert here == before[0]
    assert not [name for name in links if name.startswith(site.interface("kv").removesuffix("-kv"))]
    assert addresses == before[2]
    with child(INSIDE + "print(1, flush=True); sys.stdin.read()", places["decode-1"].netns) as witness:
        assert witness.stdout is not None
        witness.stdout.readline()
        site.close()
        site.close()
        assert not [name for name in names_of(site) if namespace.exists(name)]
        lines = Path(f"/proc/{witness.pid}/net/dev")
        assert eventually(lambda: site.interface("kv") not in lines.read_text()), "the pair goes with the hub"
        witness.kill()
    site._ledger.close()
    assert list(state.iterdir()) == []


@pytest.mark.netns
def test_a_site_opens_in_a_running_event_loop(site: NetnsSite) -> None:
    async def opened() -> dict[str, Place]:
        return site.open()

    assert asyncio.run(opened()).keys() == site.places.keys()


@pytest.mark.netns
@pytest.mark.parametrize(
    ("fault", "raised"),
    [(PermissionError(1, "no"), ConfigError), (OSError(5, "I/O"), RunError), (KeyError(), KeyError)],
)
def test_an_error_half_way_undoes_everything(
    site: NetnsSite, state: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, raised: type[Exception]
) -> None:
    seen: list[str] = []
    real = sites._give_address

    def fail_at_the_fifth(inside: Any, interface: str, address: str, prefix_length: int) -> None:
        seen.append(address)
        if len(seen) == 5:
            raise fault
        real(inside, interface, address, prefix_length)

    monkeypatch.setattr(sites, "_give_address", fail_at_the_fifth)
    with pytest.raises(raised):
        site.open()
    assert len(seen) == 5
    assert not [name for name in names_of(site) if namespace.exists(name)]
    site._ledger.close()
    assert list(state.iterdir()) == []


@pytest.mark.netns
def test_a_namespace_of_somebody_else_is_neither_taken_nor_removed(site: NetnsSite) -> None:
    site.open()
    ledger = Ledger.open(new_run_id("test"))
    again = NetnsSite(site._ledger.run_id, NODES, ledger)
    with pytest.raises(ConfigError, match="is there already"):
        again.open()
    again.close()
    ledger.close()
    assert all(namespace.exists(name) for name in names_of(site))


@pytest.mark.netns
def test_entering_a_namespace_that_is_not_there_says_so() -> None:
    with pytest.raises(RunError, match="pdemu-nothing is gone"):
        namespace.enter("pdemu-nothing")
    assert not namespace.remove("pdemu-nothing")


@pytest.mark.netns
def test_what_a_killed_run_left_is_cleaned_and_a_living_site_stays(site: NetnsSite, state: Path) -> None:
    places = site.open()
    killed = new_run_id("killed")
    with child(HOLD, killed, *NODES) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "open\n"
            assert clean() == [], "both are in progress"
        finally:
            owner.send_signal(signal.SIGKILL)
    left = [f"pdemu-{killed}-{name}" for name in ("hub", "router", "client", *NODES)]
    assert all(namespace.exists(name) for name in left)
    assert clean() == [f"removed network namespace {name} of run {killed}" for name in left]
    assert clean() == []
    assert not [name for name in left if namespace.exists(name)]
    assert [path.stem for path in state.iterdir()] == [site._ledger.run_id]
    decode = places["decode-1"]
    assert decode.kv_address is not None
    assert exchange(places["prefill-1"], decode, decode.kv_address).startswith(MESSAGE.decode())

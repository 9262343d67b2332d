"""Members without a launcher: what they agree on, and what is refused before anything is opened."""

from __future__ import annotations

import os

import msgspec
import pytest

from emulator.core.device_spec import DevicePlan, DeviceSpec
from emulator.core.errors import ConfigError, DeadlineError
from emulator.lab import member
from emulator.lab.catalog_files import load_catalog
from emulator.lab.experiment import prepare
from emulator.lab.member import (
    Access,
    Identity,
    Member,
    on_gpu,
    on_own_gpu,
    own_address,
    parse_address,
    plan_member,
    resolve,
)
from emulator.lab.topology_files import load_topology
from tests.live.lab import SMALL, TOPOLOGIES


def test_every_member_plans_the_run_that_a_launcher_would(tmp_path_factory: pytest.TempPathFactory) -> None:
    topology, catalog = load_topology(SMALL), load_catalog()
    first, second = (
        plan_member(topology, catalog, {}, "1P1D", verify_kv=False, force=False) for _ in ("router", "client")
    )
    assert first == second
    (launched,) = prepare(topology, catalog, {}, deployments=["1P1D"], out=tmp_path_factory.mktemp("folder")).runs
    assert first == launched


def test_members_make_one_run() -> None:
    with pytest.raises(ConfigError, match="one --kv-bandwidth"):
        plan_member(
            load_topology(TOPOLOGIES / "quickstart.toml"), load_catalog(), {}, "1P1D", verify_kv=False, force=False
        )


def test_a_node_may_have_a_gpu_of_its_machines_choice() -> None:
    cuda = msgspec.structs.replace(load_topology(SMALL), device=DeviceSpec(kind="cuda", gpus=(2, 3)))
    run = plan_member(cuda, load_catalog(), {}, "1P1D", verify_kv=False, force=False)
    assert run.device.gpus == (2, 3)
    assert on_gpu(run, "decode-0", None) is run
    for number, name in enumerate(("prefill-0", "decode-0")):
        assert on_gpu(run, name, 0).device.gpus[number] == 0
        assert on_gpu(run, name, 0).device.gpus[1 - number] != 0
    with pytest.raises(ConfigError, match="--gpu -1: must be 0 or more"):
        on_gpu(run, "decode-0", -1)
    virtual = plan_member(load_topology(SMALL), load_catalog(), {}, "1P1D", verify_kv=False, force=False)
    with pytest.raises(ConfigError, match="the run's device is virtual; give all members --device cuda"):
        on_gpu(virtual, "decode-0", 0)


def test_a_node_that_is_told_nothing_of_gpus_has_one_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = msgspec.structs.replace(load_topology(SMALL), device=DeviceSpec(kind="cuda"))
    run = plan_member(cuda, load_catalog(), {}, "1P1D", verify_kv=False, force=False)
    monkeypatch.setattr(member, "visible_gpus", lambda: 1)
    for number, name in enumerate(("prefill-0", "decode-0")):
        gpus = on_own_gpu(run, name).device.gpus
        assert gpus[number] == 0
        assert gpus.count(0) == 1
    monkeypatch.setattr(member, "visible_gpus", lambda: 8)
    assert on_own_gpu(run, "decode-0").device.gpus[1] == 1
    told = on_gpu(run, "decode-0", 0)
    assert on_own_gpu(told, "decode-0") is told


def test_a_node_in_a_container_need_not_see_the_gpus_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = msgspec.structs.replace(load_topology(SMALL), device=DeviceSpec(kind="cuda"))
    run = on_gpu(plan_member(topology, load_catalog(), {}, "1P1D", verify_kv=False, force=False), "decode-0", 0)
    checked: list[DevicePlan] = []

    def check(device: DevicePlan, launcher: str) -> None:
        checked.append(device)
        raise ConfigError("enough")

    monkeypatch.setattr(member, "check_device", check)
    with pytest.raises(ConfigError, match="enough"):
        Member(run=run, access=Access(), tell=lambda _: None).serve("decode-0", "127.0.0.1:1", "127.0.0.1")
    assert [device.gpus for device in checked] == [(0,)]


def test_beyond_loopback_keys_are_needed_or_insecure_on_purpose() -> None:
    Access().check("127.0.0.1")
    Access(secret="s", public_key="k").check("10.0.0.1")
    Access(insecure=True).check("10.0.0.1")
    for access in (Access(), Access(secret="s"), Access(public_key="k")):
        with pytest.raises(ConfigError, match="pdemu keys"):
            access.check("10.0.0.1")


@pytest.mark.parametrize(
    ("text", "address"), [("tcp://router:5555", ("router", 5555)), ("10.0.0.1:1", ("10.0.0.1", 1))]
)
def test_addresses_have_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "--router") == address


@pytest.mark.parametrize("text", ["router", "router:", ":5555", "router:0", "router:65536", "tcp://router:x"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text, "--router")


def test_a_name_that_never_gets_an_address_is_given_up() -> None:
    with pytest.raises(DeadlineError, match="no-such-host"):
        resolve("no-such-host.invalid", 0.0)


def test_the_kv_address_is_found_by_its_network() -> None:
    assert own_address("127.0.0.0/8") == "127.0.0.1"
    with pytest.raises(ConfigError, match="0 addresses"):
        own_address("0.0.0.0/32")
    with pytest.raises(ConfigError, match=r"10\.1\.2\.0/24"):
        own_address("nonsense")


def test_a_user_is_two_numbers() -> None:
    assert Identity.parse("7:8") == Identity(uid=7, gid=8)
    assert Identity.parse("7") == Identity(uid=7, gid=7)
    with pytest.raises(ConfigError, match="UID:GID"):
        Identity.parse("nobody")


def test_becoming_who_one_is_needs_no_right() -> None:
    Identity(uid=os.geteuid(), gid=os.getegid()).become()

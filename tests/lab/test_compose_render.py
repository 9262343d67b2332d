"""The compose file of a run, and what is read from the output of `up`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from emulator.core.deploy import plan_runs
from emulator.core.device_spec import DeviceName, DevicePlan, DeviceSpec
from emulator.core.errors import ConfigError
from emulator.core.run_spec import RunSpec
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.compose import ComposeLauncher, literal, mount, parse_line, render, render_for_hand, to_yaml
from emulator.lab.leftovers import Ledger, new_run_id
from emulator.lab.topology_files import load_topology
from emulator.live.status import Failed, Underway
from tests.core.test_calibrated_units import CALIBRATED
from tests.live.lab import SMALL, TOPOLOGIES


def _run(path: Path, deployment: str, device: DeviceSpec | None = None) -> RunSpec:
    topology = msgspec.structs.replace(load_topology(path), device=device or DeviceSpec())
    runs = plan_runs(topology, load_catalog(), plan_load(topology.workload, {}), deployments=[deployment])
    return runs[0]


def _services(text: str) -> dict[str, str]:
    """The text of each service, by name."""
    body = text.split("services:\n")[1].split("networks:\n  control:", maxsplit=1)[0]
    services: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        if line.startswith("  ") and line[2] != " ":
            name = line.strip(" :")
            services[name] = ""
        elif name:
            services[name] += line + "\n"
    return services


def test_every_node_is_a_service_that_shapes_its_own_link() -> None:
    services = _services(render(_run(TOPOLOGIES / "2p2d.toml", "2P2D"), {"A": "b"}, [], "/x:/lab/results"))
    nodes = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert list(services) == ["router", *nodes, "client"]
    for name in nodes:
        assert f'command: ["node","--name","{name}","--kv-address","{name}.kv"]' in services[name]
        assert f'aliases: ["{name}.kv"]' in services[name]
        assert 'cap_add: ["NET_ADMIN"]' in services[name]
        assert 'depends_on: ["router"]' in services[name]
    for name in ("router", "client"):
        assert "cap_add" not in services[name]
        assert "kv:" not in services[name]
    assert all('PDEMU_ROUTER: "tcp://router:5555"' in services[name] for name in (*nodes, "client"))
    assert [name for name in services if "PDEMU_ROUTER_SECRET_KEY" in services[name]] == ["router"]
    assert all('PDEMU_METRICS: "${PDEMU_METRICS:-}"' in services[name] for name in ("router", *nodes))
    assert [name for name in services if "/x:/lab/results" in services[name]] == ["client"]


def test_both_networks_are_internal_and_no_system_setting_is_asked_for() -> None:
    text = render(_run(SMALL, "1P1D"), {}, [], "/x:/y")
    assert text.endswith("networks:\n  control:\n    internal: true\n  kv:\n    internal: true\n")
    assert "sysctls" not in text
    assert "privileged: true" not in text


def test_a_colocated_run_has_no_kv_network_and_needs_no_right_to_shape() -> None:
    text = render(_run(SMALL, "colocated"), {}, [], "/x:/y")
    assert list(_services(text)) == ["router", "colocated-0", "colocated-1", "client"]
    assert "NET_ADMIN" not in text
    assert "kv" not in text.split("services:")[1]


FILES = {"trace": Path("/data/requests.csv"), "calibration": Path("/measured/h200.toml")}


def test_what_is_asked_for_is_in_every_members_environment() -> None:
    text = render_for_hand(_run(SMALL, "1P1D"), SMALL, {"PDEMU_RATE": "2"}, FILES)
    for service in _services(text).values():
        assert 'PDEMU_RATE: "2"' in service
        assert 'PDEMU_TOPOLOGY: "/lab/topology/small.toml"' in service
        assert 'PDEMU_TRACE: "/lab/trace/requests.csv"' in service
        assert 'PDEMU_CALIBRATION: "/lab/calibration/h200.toml"' in service
        assert "/measured:/lab/calibration:ro" in service
        assert f"{SMALL.parent}:/lab/topology:ro" in service
        assert "/data:/lab/trace:ro" in service


def test_a_link_is_mounted_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    there = tmp_path / "there" / "h200.toml"
    there.touch()
    link = tmp_path / "link.toml"
    link.symlink_to(there)
    text = render_for_hand(_run(SMALL, "1P1D"), SMALL, {}, {"calibration": link})
    assert 'PDEMU_CALIBRATION: "/lab/calibration/h200.toml"' in text
    assert f"{there.parent}:/lab/calibration:ro" in text


def _gpus(services: dict[str, str]) -> dict[str, str]:
    """Which GPU each service reserves."""
    reserved = re.compile(
        r"deploy:\n +resources:\n +reservations:\n +devices: "
        r'\[\{"driver":"nvidia","device_ids":\["(\d+)"\],"capabilities":\["gpu"\]\}\]\n'
    )
    return {name: found[1] for name, text in services.items() if (found := reserved.search(text))}


def test_each_node_on_a_gpu_reserves_one_and_has_cupy_in_its_image() -> None:
    services = _services(render(_run(TOPOLOGIES / "2p2d.toml", "2P2D", DeviceSpec(kind="cuda")), {}, [], "/x:/y"))
    nodes = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert _gpus(services) == dict(zip(nodes, "0123", strict=True)), "one GPU for each node, in their order"
    for name in services:
        is_node = name in nodes
        assert ('"--gpu","0"' in services[name]) is is_node, "what a container has reserved is number 0 in it"
        assert ('EXTRA: "cuda12"' in services[name]) is is_node
        assert ("PDEMU_CUDA_IMAGE:-pd-emulator" in services[name]) is is_node
        assert ("PDEMU_IMAGE:-pd-emulator" in services[name]) is not is_node


def test_the_topologys_gpus_are_reserved_in_turn() -> None:
    device = DeviceSpec(kind="cuda", gpus=(3, 1))
    services = _services(render(_run(TOPOLOGIES / "2p2d.toml", "2P2D", device), {}, [], "/x:/y"))
    assert _gpus(services) == {"prefill-0": "3", "prefill-1": "1", "decode-0": "3", "decode-1": "1"}
    one = DeviceSpec(kind="cuda", gpus=(0,), allow_shared_gpu=True)
    colocated = _services(render(_run(SMALL, "colocated", one), {}, [], "/x:/y"))
    assert _gpus(colocated) == {"colocated-0": "0", "colocated-1": "0"}


@pytest.mark.parametrize("device", [DeviceSpec(), DeviceSpec(kind="numpy")])
def test_other_devices_reserve_nothing_and_need_no_cupy(device: DeviceSpec) -> None:
    text = render(_run(SMALL, "1P1D", device), {}, [], "/x:/y")
    assert "deploy:" not in text
    assert "--gpu" not in text
    assert "EXTRA" not in text


@pytest.mark.parametrize("kind", ["numpy", "cuda"])
def test_nodes_that_measure_their_device_lock_it_in_one_volume(kind: DeviceName) -> None:
    run = _run(SMALL, "1P1D", DeviceSpec(kind=kind))
    text = render(run, {}, [], "/x:/y")
    locking = [name for name, service in _services(text).items() if "locks:/lab/locks" in service]
    assert locking == ["prefill-0", "decode-0"]
    assert all('PDEMU_LOCKS: "/lab/locks"' in _services(text)[name] for name in locking)
    assert text.endswith("volumes:\n  locks: {}\n")
    calibrated = msgspec.structs.replace(run, device=DevicePlan(kind=kind, calibration=CALIBRATED))
    for other in (calibrated, _run(SMALL, "1P1D")):
        assert "locks" not in render(other, {}, [], "/x:/y"), "nobody measures"


def test_a_path_that_compose_would_misread_is_refused() -> None:
    with pytest.raises(ConfigError, match="colon"):
        mount(Path("/a:b/c"), "results")


def test_text_is_taken_literally() -> None:
    assert literal("$HOME ${X}") == "$$HOME $${X}"


def test_yaml_nests_mappings_and_quotes_everything_else() -> None:
    value = {"a": {"b": "x: y # z", "c": [1, "no"]}, "d": {}, "e": True}
    assert to_yaml(value) == 'a:\n  b: "x: y # z"\n  c: [1,"no"]\nd: {}\ne: true\n'


NO_GPU = 'Error response from daemon: could not select device driver "nvidia" with capabilities: [[gpu]]'


@pytest.mark.live
@pytest.mark.parametrize(
    "said", [NO_GPU, "nvidia-container-cli: device error: 7: unknown device: unknown"], ids=["no driver", "no such GPU"]
)
async def test_an_engine_that_cannot_give_a_gpu_is_one_line_with_a_way_out(said: str, tmp_path: Path) -> None:
    run = _run(SMALL, "1P1D", DeviceSpec(kind="cuda"))
    launcher = ComposeLauncher(run=run, logs=tmp_path, kernel_shaping=False, on_progress=lambda status: None)
    shown = f"printf '%s\\n' '{said}' 'Encountered errors while bringing up the project.'; exit 1"
    ledger = Ledger.open(new_run_id("test"))
    try:
        with pytest.raises(ConfigError) as refused:
            await launcher._execute(["sh", "-c", shown], 30.0, ledger)
    finally:
        ledger.close()
    text = str(refused.value)
    assert text.startswith("device cuda: the container engine cannot give the nodes their GPUs")
    assert said in text
    assert "NVIDIA Container Toolkit" in text
    assert text.endswith("or use --device virtual")


@pytest.mark.parametrize("name", ["client_1     ", "client-1  "])
def test_status_lines_are_found_behind_the_services_name(name: str) -> None:
    line = name + '| {"status":"underway","now_s":1.5,"sent":3,"ended":2}\n'
    assert parse_line(line) == ("client", Underway(1.5, 3, 2))
    failed = name.replace("client", "decode-0") + '| {"status":"failed","error":"ConfigError","message":"a | b"}'
    assert parse_line(failed) == ("decode-0", Failed("ConfigError", "a | b"))


@pytest.mark.parametrize(
    "line",
    ["", "Creating router ... done", "client_1 | hello", 'client_1 | {"status":', 'client_1 | {"status":"odd"}'],
)
def test_other_lines_tell_nothing(line: str) -> None:
    assert parse_line(line) == ("", None)

"""Strict conversion: whatever is wrong in a file, the error names the file, the key, the value and what is allowed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from emulator.core import strict
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.quantities import Bytes
from emulator.core.specs import Topology

GOOD: dict[str, Any] = {
    "name": "lab",
    "model": "Llama-2-70B",
    "gpu": "h100",
    "slo": {"ttft_ms": 500, "itl_p99_ms": 60.5, "target": 0.95},
    "workload": {
        "duration": "10s",
        "drain": "1min",
        "streams": [
            {
                "name": "chat",
                "arrivals": {"process": "poisson", "rate_per_s": 2},
                "prompt_tokens": 100,
                "output_tokens": {"distribution": "uniform", "low": 1, "high": 5},
            },
            {"name": "users", "arrivals": {"process": "closed_loop", "users": 3}, "lengths": "azure-conv-like"},
        ],
    },
    "kv_network": {"bandwidth": ["2.5Gbps", "10Gbps"], "delay": "50us"},
    "host_memory": "4GiB",
    "deployments": [
        {"name": "colocated", "pools": [{"role": "colocated", "nodes": 2}]},
        {"name": "1P1D", "pools": [{"role": "prefill"}, {"role": "decode"}], "overlap": "chunk"},
    ],
}
STREAM = "workload.streams.0"
POOL = "deployments.0.pools.0"


def _changed(path: str, value: object) -> dict[str, Any]:
    """The good topology with one value replaced or added."""
    data = copy.deepcopy(GOOD)
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    place: Any = data
    for step in steps:
        place = place[step]
    place[last] = value
    return data


def _error(data: object) -> str:
    with pytest.raises(ConfigError) as caught:
        strict.convert(data, Topology, "lab.toml")
    message = str(caught.value)
    assert message.startswith("lab.toml: ")
    assert "\n" not in message
    return message.removeprefix("lab.toml: ")


def test_a_good_topology_is_read_and_written_back_unchanged() -> None:
    topology = strict.convert(GOOD, Topology, "lab.toml")
    assert topology.kv_network is not None
    assert topology.kv_network.bandwidth == (2.5e9, 10e9)
    assert topology.kv_network.delay == pytest.approx(50e-6)
    assert topology.workload.drain == 60.0
    assert topology.host_memory == Bytes(4 * 2**30)
    assert strict.convert(strict.to_builtins(topology), Topology, "again") == topology


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        # keys
        ("modle", "x", "top level: unknown key 'modle' (did you mean 'model'?); allowed: name, model, gpu, workload,"),
        ("workload.durration", "1s", "workload: unknown key 'durration' (did you mean 'duration'?); allowed: streams,"),
        (f"{POOL}.nodez", 2, "deployments[0].pools[0]: unknown key 'nodez' (did you mean 'nodes'?)"),
        (f"{STREAM}.arrivals.rate", 2, "arrivals: unknown key 'rate'; allowed: process, rate_per_s"),
        (f"{STREAM}.output_tokens.tokens", 2, "unknown key 'tokens'; allowed: distribution, low, high"),
        (f"{STREAM}.arrivals", {"rate_per_s": 2}, "workload.streams[0].arrivals: key 'process' is missing"),
        (f"{STREAM}.arrivals", {"process": "poisson"}, "workload.streams[0].arrivals: key 'rate_per_s' is missing"),
        ("deployments.0", {"name": "a"}, "deployments[0]: key 'pools' is missing"),
        # choices
        (f"{POOL}.role", "both", "deployments[0].pools[0].role = 'both': invalid enum value 'both'; allowed: prefill,"),
        (f"{POOL}.policy", "fifo", "policy = 'fifo': invalid enum value 'fifo'; allowed: chunked, prefill_first"),
        (f"{STREAM}.arrivals.process", "posson", "allowed: poisson, constant, gamma, at, closed_loop, trace"),
        (f"{STREAM}.output_tokens.distribution", "normal", "allowed: fixed, uniform, lognormal"),
        (
            "kv_network.rate_basis",
            "bits",
            "kv_network.rate_basis = 'bits'",
        ),
        (
            "deployments.1.overlap",
            "layers",
            "overlap = 'layers': invalid enum value 'layers'; allowed: none, chunk, layer",
        ),
        ("deployments.1.first_token", "decode", "allowed: handoff, prefill, recompute"),
        ("deployments.1.admission", "early", "allowed: dispatch, decode_reserve_first, prefill_first"),
        (f"{POOL}.num_reserved_decode_tokens", "some", "num_reserved_decode_tokens = 'some': invalid enum value"),
        (f"{POOL}.num_reserved_decode_tokens", -1, "num_reserved_decode_tokens = -1: expected `int` >= 0"),
        ("cost", "exact", "cost = 'exact': invalid enum value 'exact'; allowed: roofline, fitted"),
        # numbers
        (f"{STREAM}.arrivals.rate_per_s", 0, "workload.streams[0].arrivals.rate_per_s = 0: expected `float` > 0.0"),
        (f"{STREAM}.arrivals.rate_per_s", float("inf"), "arrivals.rate_per_s = inf: a number must be finite"),
        (f"{STREAM}.arrivals.rate_per_s", float("nan"), "arrivals.rate_per_s = nan: a number must be finite"),
        (f"{STREAM}.prompt_tokens", 0, "workload.streams[0].prompt_tokens = 0: expected `int` >= 1"),
        (f"{STREAM}.prompt_tokens", True, "workload.streams[0].prompt_tokens = True"),
        (f"{STREAM}.prompt_tokens", "many", "workload.streams[0].prompt_tokens = 'many'"),
        (f"{STREAM}.arrivals", {"process": "at", "times_s": [1, -1]}, "arrivals.times_s[1] = -1: expected `float` >="),
        (f"{STREAM}.output_tokens.low", 9, "workload.streams[0].output_tokens: low 9 is above high 5"),
        (f"{POOL}.nodes", 0, "deployments[0].pools[0].nodes = 0: expected `int` >= 1"),
        (f"{POOL}.nodes", 257, "deployments[0].pools[0].nodes = 257: expected `int` <= 256"),
        (f"{POOL}.gpu_memory_utilization", 1.5, "gpu_memory_utilization = 1.5: expected `float` <= 1.0"),
        ("workload.seed", 1.5, "workload.seed = 1.5: expected `int`, got `float`"),
        ("scale", {"time": 0.5}, "scale.time = 0.5: expected `float` >= 1.0"),
        ("slo.target", 1.01, "slo.target = 1.01: expected `float` <= 1.0"),
        ("control_port", 70_000, "control_port = 70000: expected `int` <= 65535"),
        # quantities
        (
            "kv_network.bandwidth",
            ["10G"],
            "kv_network.bandwidth[0] = '10G': '10G' is not a bandwidth: 'G' is not a unit",
        ),
        ("kv_network.bandwidth", ["10Gbps", 10], "kv_network.bandwidth[1] = 10: 10 has no unit"),
        ("kv_network.bandwidth", "10Gbps", "kv_network.bandwidth = '10Gbps': expected `array`, got `str`"),
        ("kv_network.bandwidth", [], "kv_network.bandwidth: expected `array` of length >= 1"),
        ("kv_network.delay", 5, 'kv_network.delay = 5: 5 has no unit: write it as text, such as "20s"'),
        ("workload.duration", "0s", "workload: duration must be greater than 0s"),
        ("workload.duration", 10, "workload.duration = 10: 10 has no unit"),
        ("host_memory", "4", "host_memory = '4': '4' is not a size: the unit is missing; units are B, kB, MB"),
        ("timeouts", {"request": "1"}, "timeouts.request = '1': '1' is not a time"),
        # things that do not go together
        ("deployments.1.pools.0.policy", "prefill_first", "deployments[1].pools[0]: policy prefill_first is for coloc"),
        ("deployments.1.pools", [{"role": "prefill"}], "deployments[1]: pools of prefill: a deployment is colocated"),
        ("deployments.1.name", "colocated", "deployment names must differ, got colocated, colocated"),
        ("deployments.1.name", "a b", "deployments[1].name = 'a b': expected `str` matching regex"),
        ("deployments", [], "deployments: expected `array` of length >= 1"),
        ("workload.streams.1.name", "chat", "workload: stream names must differ, got chat, chat"),
        ("workload.streams.1.prompt_tokens", 5, "workload.streams[1]: give either lengths or prompt_tokens and output"),
        (f"{STREAM}.output_tokens", None, "workload.streams[0]: prompt_tokens and output_tokens are both needed"),
        (f"{STREAM}.arrivals", {"process": "trace", "file": "x.csv"}, "a trace brings its own lengths"),
        ("cost", "fitted", 'top level: cost = "fitted" needs profile = "NAME"'),
        ("profile", "article-70b", 'top level: a profile needs cost = "fitted"'),
        ("kv_network", None, "top level: a disaggregated deployment needs [kv_network] with a bandwidth"),
    ],
)
def test_an_error_names_key_value_and_what_is_allowed(path: str, value: object, said: str) -> None:
    assert said in _error(_changed(path, value))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({key: value for key, value in GOOD.items() if key != "model"}, "top level: key 'model' is missing"),
        ([], "top level: expected `object`, got `array`"),
        ("lab", "top level = 'lab': expected `object`, got `str`"),
        (float("nan"), "a number must be finite"),
    ],
    ids=["no model", "list", "text", "nan"],
)
def test_a_file_that_is_no_topology_at_all(data: object, said: str) -> None:
    assert said in _error(data)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "x"}, "models[0]: key 'layers' is missing"),
        ({"name": "x", "layer": 1}, "unknown key 'layer' (did you mean 'layers'?)"),
    ],
)
def test_a_catalog_is_read_as_strictly(entry: Mapping[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml") as caught:
        strict.convert({"models": [entry]}, Catalog, "mine.toml")
    assert said in str(caught.value)

"""Topology files on top of others."""

from __future__ import annotations

from emulator.core.layered import layered


def test_tables_are_merged_key_by_key_and_the_upper_value_stands() -> None:
    base = {"model": "a", "slo": {"ttft_ms": 1, "tpot_ms": 2}, "workload": {"streams": [1], "seed": 1}}
    own = {"model": "b", "slo": {"tpot_ms": 3}, "workload": {"streams": [2]}}
    assert layered([base, own]) == {
        "model": "b",
        "slo": {"ttft_ms": 1, "tpot_ms": 3},
        "workload": {"streams": [2], "seed": 1},
    }
    assert base["slo"] == {"ttft_ms": 1, "tpot_ms": 2}


def test_named_entries_add_up_and_what_two_files_share_stands_once() -> None:
    shared = {"name": "colocated"}
    first = {"deployments": [shared, {"name": "vllm"}]}
    second = {"deployments": [dict(shared), {"name": "sglang"}]}
    assert layered([first, second]) == {"deployments": [shared, {"name": "vllm"}, {"name": "sglang"}]}


def test_what_is_of_another_kind_replaces_and_is_left_for_the_strict_parser() -> None:
    assert layered([{"deployments": [1]}, {"deployments": "x"}]) == {"deployments": "x"}
    assert layered([{"slo": {"ttft_ms": 1}}, {"slo": 3}]) == {"slo": 3}
    assert layered([{"slo": 3}, {"slo": {"ttft_ms": 1}}]) == {"slo": {"ttft_ms": 1}}

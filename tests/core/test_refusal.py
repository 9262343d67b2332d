"""Requests that no node of a cluster can ever serve, before they are sent."""

from __future__ import annotations

import pytest

from emulator.core.deployments import Conditional, RoleSwitching
from emulator.core.refusal import run_refusal
from tests.builders import load_plan, node_spec, pair, run_spec


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "refused"), [(100, 60, ""), (100, 61, "need KV for 161 tokens"), (161, 1, "KV")]
)
def test_one_colocated_node_with_room_is_enough(prompt_tokens: int, max_tokens: int, refused: str) -> None:
    nodes = [node_spec("colocated-0", kv_blocks=4), node_spec("colocated-1", kv_blocks=10)]
    found = run_refusal(run_spec(nodes, load_plan()), prompt_tokens, max_tokens)
    assert refused in found
    assert bool(found) == bool(refused)
    if refused:
        assert "colocated-1 has room for 160" in found, "the roomiest says it"


def test_the_limit_that_is_told_is_the_one_that_binds() -> None:
    run = run_spec([node_spec(max_model_len=100)], load_plan())
    assert "exceed the context of 100 tokens" in run_refusal(run, 90, 11)
    run = run_spec(pair(prefill_blocks=5, decode_blocks=100), load_plan())
    assert "prefill-0 has room for 80" in run_refusal(run, 81, 1)
    assert run_refusal(run, 80, 1_000) == "", "a prefill node needs room for the prompt alone"
    run = run_spec(pair(prefill_blocks=100, decode_blocks=5), load_plan())
    assert "decode-0 has room for 80" in run_refusal(run, 70, 11)


def test_who_may_serve_alone_counts_as_well() -> None:
    small_prefill = pair(prefill_blocks=1, decode_blocks=100)
    assert run_refusal(run_spec(small_prefill, load_plan()), 100, 10)
    conditional = Conditional(eff_isl_threshold=1_000)
    assert not run_refusal(run_spec(small_prefill, load_plan(), conditional=conditional), 100, 10)
    switching = RoleSwitching(max_queued_prompt_tokens=1, max_kv_usage=0.5)
    assert not run_refusal(run_spec(small_prefill, load_plan(), role_switching=switching), 100, 10)
    small_decode = pair(prefill_blocks=100, decode_blocks=1)
    run = run_spec(small_decode, load_plan(), first_token="prefill")
    assert not run_refusal(run, 100, 1), "its only token is streamed by prefill"
    assert run_refusal(run, 100, 2)


@pytest.mark.parametrize(
    ("lost", "serves"),
    [((), True), (("prefill-0",), False), (("decode-0",), False), (("decode-0", "prefill-0"), False)],
)
def test_a_cluster_serves_while_each_phase_has_a_node(lost: tuple[str, ...], serves: bool) -> None:
    assert run_spec(pair(), load_plan()).serves_without(lost) == serves


def test_nodes_that_help_each_other_out_serve_alone_too() -> None:
    switching = RoleSwitching(max_queued_prompt_tokens=1, max_kv_usage=0.5)
    assert run_spec(pair(), load_plan(), role_switching=switching).serves_without(["prefill-0"])
    nodes = [node_spec("mixed-0", role="mixed"), node_spec("mixed-1", role="mixed")]
    assert run_spec(nodes, load_plan()).serves_without(["mixed-1"])
    nodes = [node_spec("colocated-0"), node_spec("colocated-1")]
    assert run_spec(nodes, load_plan()).serves_without(["colocated-0"])
    assert not run_spec(nodes, load_plan()).serves_without(["colocated-0", "colocated-1"])

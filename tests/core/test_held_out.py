"""Held-out figures as steps: units, kinds, and rows that make no sense."""

from __future__ import annotations

import pytest

from emulator.core.catalog import find_model
from emulator.core.errors import ConfigError
from emulator.core.hardware import WeightsDtype
from emulator.core.held_out import HeldOutStep, kind_of, parse_held_out, parse_held_out_sources
from emulator.lab.catalog_files import load_catalog

HEADER = "gpu,model,tp,weights,kv,phase,batch,tokens,new_tokens,value,unit,source\n"


def parsed(row: str) -> HeldOutStep:
    (step,) = parse_held_out(HEADER + row, "held_out.csv")
    return step


def test_a_throughput_is_the_time_of_one_token_of_each_sequence() -> None:
    run = parsed("h100,m,2,fp8,fp8,run,64,2048,2048,547,tok/s/GPU,s")
    assert run.ms == pytest.approx(64 / (547 * 2) * 1e3)
    assert parsed("h100,m,2,fp8,fp8,run,64,2048,2048,1094,tok/s,s").ms == pytest.approx(run.ms)
    assert parsed("h100,m,2,fp8,fp8,prefill,1,128,,6.3,ms,s").ms == 6.3
    assert parsed("h100,m,1,fp8,fp8,served,,128,2048,20000,tok/s,s").ms == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("h100,m,1,fp8,fp8,prefill,,128,,6.3,ms,s", "batch"),
        ("h100,m,1,fp8,fp8,run,4,128,,6.3,tok/s,s", "new_tokens"),
        ("h100,m,1,fp8,fp8,served,4,128,8,6.3,tok/s,s", "batch"),
        ("h100,m,1,int4,fp8,prefill,1,128,,6.3,ms,s", "int4"),
        ("h100,m,1,fp8,fp8,prefill,1,128,,0,ms,s", "value"),
    ],
)
def test_a_row_that_makes_no_sense_is_named_by_its_line(row: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"held_out\.csv: line 2: .*{message}"):
        parsed(row)


def test_an_unknown_key_of_a_source_is_named() -> None:
    with pytest.raises(ConfigError, match="fitted"):
        parse_held_out_sources({"sources": [{"name": "s", "text": "t", "known": "k", "fitted": True}]}, "held_out.toml")


@pytest.mark.parametrize(
    ("model", "weights", "kind"),
    [
        ("Llama-3.1-8B", "bf16", "16-bit dense"),
        ("Llama-3.1-8B", "fp8", "fp8 dense"),
        ("Mixtral-8x7B", "fp16", "16-bit MoE"),
        ("Mixtral-8x7B", "fp8", "fp8 MoE"),
        ("DeepSeek-V3", "fp16", "16-bit MLA"),
        ("DeepSeek-V3", "fp8", "fp8 MLA"),
    ],
)
def test_kinds(model: str, weights: WeightsDtype, kind: str) -> None:
    assert kind_of(find_model(load_catalog(), model), weights) == kind

from __future__ import annotations

import json

import msgspec

from emulator.core.compare_summary import CompareSummary, stated_first_token
from emulator.core.specs import Scale, Slo
from tests.core.made_records import made_record, made_run

SLO = Slo(ttft_ms=150, tpot_ms=25)


def test_the_document_has_the_promised_keys_and_reads_back() -> None:
    run = made_run([made_record(wire_ms=5.0)], SLO, deployment="1p1d", kv_bandwidth_bps=5e9).summary
    document = CompareSummary(
        topology="quickstart",
        launcher="local",
        shaping="paced",
        scale=Scale(),
        first_token="handoff",
        seed=1,
        slo=SLO,
        runs=(run,),
    )
    data = msgspec.json.encode(document)
    keys = json.loads(data)
    assert {"topology", "launcher", "shaping", "scale", "first_token", "runs", "verdict", "cost_basis"} <= keys.keys()
    assert keys["scale"] == {"time": 1.0, "bytes": 1.0}
    promised = (
        "deployment kv_bandwidth_bps gpus requests completed failed slo_attainment request_goodput ttft_ms tpot_ms "
        "itl_ms e2el_ms ttft_breakdown_ms kv fidelity costs"
    )
    assert set(promised.split()) <= keys["runs"][0].keys()
    assert {"ok", "step_lateness_ms_p99", "loop_lag_ms_p99", "link_ratio", "reasons"} <= keys["runs"][0][
        "fidelity"
    ].keys()
    assert msgspec.json.decode(data, type=CompareSummary) == document


def test_one_word_says_who_streams_first_tokens_where_all_runs_agree() -> None:
    assert stated_first_token([None, "prefill", "prefill"]) == "prefill"
    assert stated_first_token(["handoff", None, "recompute"]) == "mixed"
    assert stated_first_token([None]) is None

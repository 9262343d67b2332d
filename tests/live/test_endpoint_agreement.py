"""What clients of a cluster measure is what the run's folder says.

They are `pdemu bench` by HTTP and by the control network, and OpenAI's own client.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_agreement.py"
STEP_MS = 25.0
FEWEST_TOKENS = 48
LATE_MS = 100.0
"""A client, the endpoint and two nodes want to run when a step ends, on two cores that others use as well: any of them
may wait for its turn some scheduler slices, and what is late by that is the instant of one token. A TTFT ends with one,
a TPOT is the distance of two over the tokens between. `tools/bench_agreement.py` asks for 10 ms and 2 % on an idle
machine."""


@pytest.mark.live
@pytest.mark.alone
@pytest.mark.slow
def test_what_clients_measure_is_what_the_records_say() -> None:
    command = [sys.executable, str(TOOL), "--requests", "8", "--step-ms", str(STEP_MS), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    found = msgspec.json.decode(ended.stdout)
    assert [client["name"] for client in found] == ["pdemu bench", "… tcp://", "OpenAI's client"]
    for client in found:
        assert client["client"]["requests"] == client["records"]["requests"] == 8
        assert (client["failed"], client["mismatches"]) == (0, 0)
        assert abs(client["ttft_difference_ms"]) <= LATE_MS
        assert abs(client["tpot_difference_share"]) * STEP_MS <= LATE_MS / (FEWEST_TOKENS - 1)
        assert client["records"]["tpot_mean_ms"] >= STEP_MS

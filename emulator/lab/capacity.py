"""What this machine carries, measured in a few seconds: a KV link, and the CPU time of steps, tokens and bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from emulator.core.autoscale import Capacity
from emulator.core.cost import FittedCost
from emulator.core.errors import RunError
from emulator.core.hardware import DecodeFit, FittedProfile
from emulator.core.run_spec import NodeSpec, RouterSpec, RunSpec
from emulator.core.specs import Scale, Slo
from emulator.core.workload import LoadPlan, PlannedRequest
from emulator.lab.launch import ProcessLauncher
from emulator.lab.parallel import cores
from emulator.lab.sites import make_site
from emulator.live.allocator import NODE_ALLOCATOR_ENV

LIMIT_S = 30.0
STEP_S = 5e-3
STEPS = 240
BATCH = 32
_MODULE = (sys.executable, "-m", "emulator.live.capacity")


def machine_capacity(*, links: bool = True) -> Capacity:
    """Measure this machine; without `links` only what runs without a KV network need, the link counts as unlimited.

    Raises RunError when it cannot be measured.
    """
    link_bps, byte_cpu_s, late_s = _link() if links else (float("inf"), 0.0, 0.0)
    alone, many = (asyncio.run(_cpu_s_per_step(batch)) for batch in (1, BATCH))
    token_cpu_s = max(0.0, (many - alone) / (BATCH - 1))
    return Capacity(
        link_bps=link_bps,
        cores=cores(),
        byte_cpu_s=byte_cpu_s,
        late_s=late_s,
        step_cpu_s=max(0.0, alone - token_cpu_s),
        token_cpu_s=token_cpu_s,
    )


# --- a link -----------------------------------------------------------------------------------------------------------


def _link() -> tuple[float, float, float]:
    """Payload bits per second of one KV link here, CPU seconds a byte of both its ends, and how late transfers are."""
    with contextlib.ExitStack() as stack:
        receiver = _start(stack, "receive")
        assert receiver.stdout is not None
        sender = _start(stack, "send", *receiver.stdout.readline().split())
        try:
            received, _ = receiver.communicate(timeout=LIMIT_S)
            bits_per_s, cpu_s_per_byte, late_s = map(float, received.split())
            sent, _ = sender.communicate(timeout=LIMIT_S)
            return bits_per_s, cpu_s_per_byte + float(sent), max(0.0, late_s)
        except (subprocess.TimeoutExpired, ValueError):
            raise RunError(f"--scale auto: this machine's links could not be measured within {LIMIT_S:g} s") from None


def _start(stack: contextlib.ExitStack, *args: str) -> subprocess.Popen[str]:
    """Start one end; it is ended with the stack, whatever happens."""
    process = subprocess.Popen(
        [*_MODULE, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **NODE_ALLOCATOR_ENV},
    )
    stack.callback(process.wait, 5)
    stack.callback(process.kill)
    return process


# --- steps ------------------------------------------------------------------------------------------------------------


async def _cpu_s_per_step(batch: int) -> float:
    """CPU seconds of router, one colocated node and client together for each step of a small live run."""
    run = _small_run(batch)
    with tempfile.TemporaryDirectory() as folder:
        live = await ProcessLauncher(
            run=run,
            site=make_site("local", run),
            folder=Path(folder),
            host_memory_bytes=0,
            expected_kv_bytes=0,
            kernel_shaping=False,
            on_progress=lambda _: None,
        ).launch()
    report = live.report
    return report.cpu_s / max(1, sum(len(node.steps) for node in report.nodes))


def _small_run(batch: int) -> RunSpec:
    """`batch` requests at once, decoding in steps of 5 ms for 1.2 s."""
    profile = FittedProfile(
        name="calibration",
        model="any",
        gpu="any",
        tp=1,
        prefill_base_ms=STEP_S * 1e3,
        prefill_per_token_ms=0.0,
        prefill_per_token2_ms=0.0,
        decode=DecodeFit(base_ms=STEP_S * 1e3, per_context_token_ms=0.0, per_sequence_ms=0.0),
        source="a step of constant length",
    )
    node = NodeSpec(
        name="colocated-0",
        role="colocated",
        cost=FittedCost(profile=profile),
        gpus=1,
        policy="chunked",
        max_num_batched_tokens=4_096,
        max_num_seqs=2 * BATCH,
        kv_blocks=100_000,
        block_size=16,
        kv_bytes_per_token=1,
        max_model_len=10_000,
        num_reserved_decode_tokens=0,
        overlap="none",
        kv_lease_s=30.0,
    )
    requests = tuple(PlannedRequest(f"r{n}", "calibration", 0.0, 16, STEPS) for n in range(batch))
    return RunSpec(
        topology="calibration",
        deployment="colocated",
        nodes=(node,),
        router=RouterSpec(disaggregated=False, routing="least_loaded", node_lost_s=10.0, request_s=60.0),
        link=None,
        load=LoadPlan(requests, (), 0.1, 10.0),
        slo=Slo(),
        scale=Scale(),
        seed=0,
        model="any",
    )

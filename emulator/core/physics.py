"""What no run can do, whoever ran it: bytes beyond a NIC's rate, FLOPs beyond a GPU's peak, tokens out of nothing.

A simulator that breaks one of these reports latencies that no cluster could have, and its curves look fine. So every
run is held against them, from its records and steps alone. Arithmetic is counted from below and independently of the
cost models: a token takes at least 2 FLOPs for each parameter of the linear layers that it uses, and a step reads
those weights at least once. Attention, activations and everything else come on top and are left out.

A published profile has step times but no peak: its steps are held against the GPU and the model that it names where a
catalog has both (`unchecked` says where none does). What is found then may be the profile's doing: a fit is at fault
where it is asked for prompts of a few tokens, or for more sequences than were measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from emulator.core.cost import RooflineCost
from emulator.core.hardware import Catalog
from emulator.core.physics_link import Allowance, link_violations
from emulator.core.physics_memory import memory_violations
from emulator.core.physics_rules import INSTANT_S, said
from emulator.core.physics_steps import machine, step_violations
from emulator.core.records import MemoryRecord, Record, StepRecord, TimeRun
from emulator.core.run_spec import RunSpec

SIMULATED = Allowance(rate_share=1e-9, bursts=0, time_s=1e-6)
"""Rounding alone."""
MEASURED = Allowance(rate_share=0.03, bursts=2, time_s=1e-3, queued_bytes=24 * 1024 * 1024)
"""What a faithful run may have: links within 3 % of their rate, a burst at either end, clocks within 1 ms.

What may queue for a receiver that wakes late: 16 frames of 1 MiB in ZeroMQ, 8 MiB in the kernel's receive buffer.
"""


def violations(
    run: RunSpec,
    records: Sequence[Record],
    steps: Sequence[StepRecord],
    *,
    memory: Iterable[MemoryRecord] = (),
    catalog: Catalog | None = None,
    simulated: bool = False,
) -> list[str]:
    """A sentence for each law that a run breaks, with its first case; none for a run that could be.

    A `simulated` run is held to the letter; a live one is allowed what its fidelity allows, and links that it was
    forced to use as they are have no rate to keep. `catalog` serves runs whose step times are a profile.
    """
    allowed = SIMULATED if simulated else MEASURED
    found = _accounts(run, records) + _token_times(records)
    found += step_violations(run, records, steps, catalog=catalog, simulated=simulated)
    found += memory_violations(run, memory)
    return found + link_violations(run, records, allowed, rates_hold=simulated or not run.force)


def unchecked(run: RunSpec, catalog: Catalog | None = None) -> list[str]:
    """A sentence for each profile whose steps have no peak to be held against."""
    profiles = {n.cost.profile for n in run.nodes if not isinstance(n.cost, RooflineCost) and not machine(n, catalog)}
    return [
        f"the steps of profile {profile.name} were not held against a peak: no GPU {profile.gpu} or no model "
        f"{profile.model} is in the catalog"
        for profile in sorted(profiles, key=lambda profile: profile.name)
    ]


def _accounts(run: RunSpec, records: Sequence[Record]) -> list[str]:
    """Every planned request has one record, as planned, and nobody else has one; users count without a gap."""
    planned = {request.request_id: request for request in run.load.open}
    seen = Counter(record.request_id for record in records)
    twice = [f"{request_id} has {n} records" for request_id, n in seen.items() if n > 1]
    lost = [f"{request_id} was planned and has no record" for request_id in planned if request_id not in seen]
    changed, turns = [], {user.prefix: set[int]() for user in run.load.users}
    unknown = []
    for record in records:
        request = planned.get(record.request_id)
        if request is None:
            prefix, _, number = record.request_id.rpartition("-")
            if prefix in turns and number.isdecimal():
                turns[prefix].add(int(number))
            else:
                unknown.append(f"{record.request_id} was never planned")
        elif (record.scheduled_s, record.prompt_tokens, record.max_tokens) != (
            request.scheduled_s,
            request.prompt_tokens,
            request.max_tokens,
        ):
            changed.append(f"{record.request_id} is not as it was planned")
    lost += [
        f"user {prefix} has {len(numbers)} records, numbered up to {max(numbers, default=0)}"
        for prefix, numbers in turns.items()
        if len(numbers) != max(numbers, default=0) + 1
    ]
    return said("not every request is accounted for", twice + lost + unknown + changed)


def _token_times(records: Iterable[Record]) -> list[str]:
    """Tokens are counted as they came, in order, after the arrival and before the end; the completed have all."""
    wrong, late = [], []
    for record in records:
        name, due = record.request_id, record.max_tokens
        n, first, last, ordered = _walk(record.token_times_s)
        if n != record.output_tokens:
            wrong.append(f"{name} has {record.output_tokens} output tokens but the instants of {n}")
        elif n > due or (n < due and record.outcome == "completed"):
            wrong.append(f"{name}, {record.outcome}, has {n} output tokens where {due} were asked for")
        if not n:
            continue
        if record.first_token_s is None or abs(first - record.first_token_s) > INSTANT_S:
            late.append(f"the first token of {name} came at {first:g} s, and is said to have come otherwise")
        elif first < record.scheduled_s - INSTANT_S:
            late.append(f"the first token of {name} came {record.scheduled_s - first:g} s before its arrival")
        elif not ordered:
            late.append(f"a token of {name} came before the one that precedes it")
        elif record.finish_s is not None and record.finish_s < last - INSTANT_S:
            late.append(f"{name} ended at {record.finish_s:g} s, before its last token at {last:g} s")
    return said("output tokens are not conserved", wrong) + said("tokens are out of time", late)


def _walk(times: Sequence[float | TimeRun]) -> tuple[int, float, float, bool]:
    """How many instants there are, the first, the last, and whether they come in order; runs are not written out."""
    count, last, ordered = len(times), -math.inf, True
    for entry in times:
        if isinstance(entry, TimeRun):
            start, gaps, first_gap_s, delta_s = entry.t0_s, entry.n - 1, entry.first_step_s, entry.delta_s
            end = start + gaps * (first_gap_s + delta_s * (gaps - 1) / 2)
            if gaps and (first_gap_s < -INSTANT_S or first_gap_s + (gaps - 1) * delta_s < -INSTANT_S):
                ordered = False
            count += gaps
        else:
            start = end = entry
        if start < last - INSTANT_S:
            ordered = False
        last = end
    first = times[0] if times else math.nan
    return count, first.t0_s if isinstance(first, TimeRun) else first, last, ordered

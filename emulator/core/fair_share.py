"""Who gets which share of which NIC: max-min fairness, which TCP flows through shaped NICs roughly follow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

Pair = tuple[str, str]
"""(source, destination)."""
Rates = Mapping[str, float | None]
_Nic = tuple[str, str]  # (direction, node)


def fair_shares(pairs: Iterable[Pair], egress: Rates, ingress: Rates) -> dict[Pair, float]:
    """Max-min fair rates of (source, destination) pairs in bytes per second; inf where no NIC limits.

    Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): all rates rise together until a NIC is full,
    its pairs stay there, the others go on. Summed in the order of names, so that equal sets give equal floats.
    """
    ordered = sorted(set(pairs))
    if len({source for source, _ in ordered}) == len({destination for _, destination in ordered}) == len(ordered):
        return {pair: _alone(egress[pair[0]], ingress[pair[1]]) for pair in ordered}
    members: dict[_Nic, list[Pair]] = {}
    room: dict[_Nic, float] = {}
    for pair in ordered:
        for nic, rate in zip(_nics(pair), (egress[pair[0]], ingress[pair[1]]), strict=True):
            if rate is not None:
                members.setdefault(nic, []).append(pair)
                room[nic] = rate
    rising = {nic: len(at_nic) for nic, at_nic in members.items()}  # how many pairs of each NIC are not settled
    rates: dict[Pair, float] = {}
    level = 0.0
    while rising:
        fullest = min(rising, key=lambda nic: room[nic] / rising[nic])
        level = max(level, room[fullest] / rising[fullest])  # rounding must not take back what others were given
        for pair in members[fullest]:
            if pair in rates:
                continue
            rates[pair] = level
            for nic in _nics(pair):
                if nic in room:
                    room[nic] -= level
                    rising[nic] -= 1
        rising = {nic: n for nic, n in rising.items() if n > 0}
    return {pair: rates.get(pair, math.inf) for pair in ordered}


def _alone(egress: float | None, ingress: float | None) -> float:
    """The rate of a pair that shares neither NIC."""
    return min(math.inf if egress is None else egress, math.inf if ingress is None else ingress)


def _nics(pair: Pair) -> tuple[_Nic, _Nic]:
    return ("egress", pair[0]), ("ingress", pair[1])


def check_shares(rates: Mapping[Pair, float], egress: Rates, ingress: Rates) -> None:
    """Assert that each pair is held back by a NIC that is full and at which nobody is faster, or by none at all."""
    for pair, rate in rates.items():
        at_source = [r for (source, _), r in rates.items() if source == pair[0]]
        at_destination = [r for (_, destination), r in rates.items() if destination == pair[1]]
        ends = ((egress[pair[0]], at_source), (ingress[pair[1]], at_destination))
        assert all(cap is None or math.fsum(users) <= cap * (1 + 1e-9) for cap, users in ends), f"{pair}: too fast"
        held_back = any(_holds_back(rate, cap, users) for cap, users in ends)
        assert held_back or rate == math.inf, f"{pair}: could be faster"


def _holds_back(rate: float, cap: float | None, users: Collection[float]) -> bool:
    return cap is not None and math.fsum(users) >= cap * (1 - 1e-9) and rate >= max(users) * (1 - 1e-9)

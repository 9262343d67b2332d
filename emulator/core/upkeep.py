"""What a deployment costs while it serves: dollars, power, and the memory of its weights and KV. For every command.

Prices are those of the catalog, or of a topology's own GPUs: typical ones, which differ by provider. Power is the TDP
of the GPUs alone, which they seldom draw in full, so energy is an upper bound and requests per joule a lower one. What
is not known is null, and so is whatever follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from emulator.core.hardware import Gpu

COST_BASIS = "prices are indicative; watts are TDP, an upper bound"
"""What every output with costs says of them."""

S_PER_H = 3600
J_PER_KJ = 1e3

_Number = TypeVar("_Number", int, float)


class Upkeep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What GPUs cost while they are held: dollars an hour, and watts by their TDP; null where one is not known."""

    usd_per_h: float | None = None
    watts: float | None = None

    @classmethod
    def of_gpus(cls, gpu: Gpu, count: int) -> Upkeep:
        """That of `count` GPUs of one kind."""
        price = gpu.price_usd_per_h
        return cls(usd_per_h=None if price is None else count * price, watts=count * gpu.tdp_w)

    @classmethod
    def total(cls, parts: Iterable[Upkeep]) -> Upkeep:
        """That of all parts together."""
        parts = tuple(parts)
        return cls(
            usd_per_h=known_sum([part.usd_per_h for part in parts]), watts=known_sum([part.watts for part in parts])
        )

    def per_usd(self, rate_per_s: float) -> float | None:
        """What a dollar buys at a rate, requests per second: requests."""
        return rate_per_s * S_PER_H / self.usd_per_h if self.usd_per_h else None

    def per_joule(self, rate_per_s: float) -> float | None:
        """What a joule buys at a rate, requests per second: requests."""
        return rate_per_s / self.watts if self.watts else None


class Holdings(Upkeep, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a deployment holds whatever its load.

    `weight_bytes` are those of all its nodes, each of which holds the whole model however many GPUs it has:
    `weight_copies` times the model's weights. `kv_capacity_bytes` is the KV that fits beside them on all nodes, that of
    each token counted once, also where several GPUs of a node hold the same; what prefill nodes have of it holds
    prompts under way, not the sequences that decode.
    """

    weight_bytes: int | None = None
    weight_copies: int | None = None
    kv_capacity_bytes: int | None = None


class Costs(Holdings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a deployment holds, and what a dollar and a joule bought under the load of one run.

    `requests` are those that completed, `goodput_requests` those that met every SLO, both per second of the arrival
    window, in which they were due (of a saturated run, some completed after it): a deployment that is not busy costs as
    much and serves less.
    """

    requests_per_usd: float | None = None
    goodput_requests_per_usd: float | None = None
    requests_per_joule: float | None = None
    goodput_requests_per_joule: float | None = None

    @classmethod
    def of(cls, held: Holdings, *, completed_per_s: float, goodput_per_s: float) -> Costs:
        """The costs of serving so many requests per second, of which so many within their SLO."""
        return cls(
            **{name: getattr(held, name) for name in Holdings.__struct_fields__},
            requests_per_usd=held.per_usd(completed_per_s),
            goodput_requests_per_usd=held.per_usd(goodput_per_s),
            requests_per_joule=held.per_joule(completed_per_s),
            goodput_requests_per_joule=held.per_joule(goodput_per_s),
        )


def known_sum(parts: Sequence[_Number | None]) -> _Number | None:
    """The sum of all parts; None where one of them is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def per_kj(per_joule: float | None) -> float | None:
    """Requests per kJ, which are requests per second and kW, from requests per joule."""
    return None if per_joule is None else per_joule * J_PER_KJ

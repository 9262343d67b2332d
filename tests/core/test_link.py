"""The modelled network: bytes arrive once, no NIC is too fast, none idles while somebody waits, times are exact."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.fair_share import Pair, fair_shares
from emulator.core.link import Delivery, FairShareNetwork, Part, expected_ends
from tests.examples import examples

NODES = ("a", "b", "c")
Caps = dict[str, float | None]


def _network(
    egress: float | None = 100.0,
    ingress: float | None = 100.0,
    *,
    seed: int = 0,
    delay_s: float = 0.0,
    jitter_s: float = 0.0,
) -> FairShareNetwork:
    return FairShareNetwork(
        egress_bytes_per_s=dict.fromkeys(NODES, egress),
        ingress_bytes_per_s=dict.fromkeys("xyz", ingress),
        seed=seed,
        delay_s=delay_s,
        jitter_s=jitter_s,
    )


def _drain(network: FairShareNetwork) -> list[Delivery]:
    deliveries = []
    while (instant := network.next_event_s()) is not None:
        deliveries += network.advance(instant)
        network.check_integrity()
    return deliveries


def _ends(network: FairShareNetwork) -> dict[object, float]:
    return {delivery.transfer_id: delivery.end_s for delivery in _drain(network)}


# --- shares ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("egress", "ingress", "rate"),
    [(40.0, 100.0, 40.0), (100.0, 40.0, 40.0), (None, 40.0, 40.0), (None, None, math.inf)],
)
def test_one_pair_alone_gets_the_slower_of_its_ends(egress: float | None, ingress: float | None, rate: float) -> None:
    assert fair_shares([("a", "x")], {"a": egress}, {"x": ingress}) == {("a", "x"): rate}


def test_what_one_pair_cannot_use_goes_to_the_others() -> None:
    # c is held back by its own 10, both pairs of b by b's 80, and a gets what they leave of x's 100.
    pairs = [("a", "x"), ("b", "x"), ("c", "x"), ("b", "y")]
    rates = fair_shares(pairs, {"a": None, "b": 80.0, "c": 10.0}, {"x": 100.0, "y": 100.0})
    assert rates == {("c", "x"): 10.0, ("b", "y"): 40.0, ("b", "x"): 40.0, ("a", "x"): 50.0}


caps = st.one_of(st.none(), st.floats(1.0, 1e10))
cap_maps = st.tuples(
    st.fixed_dictionaries(dict.fromkeys("abc", caps)), st.fixed_dictionaries(dict.fromkeys("xyz", caps))
)
pair_sets = st.sets(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1)


@given(pairs=pair_sets, both=cap_maps)
@examples(200)
def test_shares_are_within_every_rate_and_max_min_fair(pairs: set[Pair], both: tuple[Caps, Caps]) -> None:
    rates = fair_shares(pairs, *both)
    assert rates.keys() == pairs
    for pair, rate in rates.items():
        bottlenecks = []
        for end, caps_of_end in enumerate(both):
            cap = caps_of_end[pair[end]]
            sharing = [r for p, r in rates.items() if p[end] == pair[end]]
            if cap is not None:
                assert sum(sharing) <= cap * (1 + 1e-9)
                bottlenecks.append(sum(sharing) >= cap * (1 - 1e-9) and rate >= max(sharing) * (1 - 1e-9))
        assert any(bottlenecks) or (rate == math.inf and not bottlenecks)


# --- times ----------------------------------------------------------------------------------------------------


def test_one_transfer_takes_its_bytes_over_the_rate_plus_the_delay() -> None:
    network = _network(ingress=50.0, delay_s=0.25)
    network.start("t", "a", "x", 200, 1.0)
    assert network.rates_bytes_per_s() == {("a", "x"): 50.0}
    assert network.next_event_s() == 5.0
    assert network.advance(5.0) == []
    assert network.next_event_s() == 5.25
    assert network.advance(5.25) == [Delivery("t", 1.0, 5.25, 200)]
    assert network.next_event_s() is None


def test_transfers_of_one_pair_go_one_after_the_other() -> None:
    network = _network()
    for n in range(3):
        network.start(n, "a", "x", 100, 0.0)
    assert _drain(network) == [Delivery(0, 0.0, 1.0, 100), Delivery(1, 1.0, 2.0, 100), Delivery(2, 2.0, 3.0, 100)]


def test_two_senders_into_one_receiver_get_half_each_and_the_rest_when_one_is_done() -> None:
    network = _network()
    network.start("short", "a", "x", 100, 0.0)
    network.start("long", "b", "x", 200, 0.0)
    assert network.rates_bytes_per_s() == {("a", "x"): 50.0, ("b", "x"): 50.0}
    assert _ends(network) == {"short": 2.0, "long": 3.0}


def test_one_sender_into_two_receivers_halves_its_egress() -> None:
    network = _network()
    network.start("t", "a", "x", 100, 0.0)
    network.start("u", "a", "y", 100, 0.0)
    assert _ends(network) == {"t": 2.0, "u": 2.0}


def test_a_newcomer_slows_the_transfer_under_way() -> None:
    network = _network()
    network.start("first", "a", "x", 100, 0.0)
    network.start("second", "b", "x", 100, 0.5)
    assert _ends(network) == {"first": 1.5, "second": 2.0}


def test_pairs_without_a_common_end_do_not_meet() -> None:
    network = _network()
    network.start("t", "a", "x", 100, 0.0)
    network.start("u", "b", "y", 100, 0.0)
    assert _ends(network) == {"t": 1.0, "u": 1.0}


def test_delay_postpones_arrival_but_not_the_next_transfer() -> None:
    network = _network(delay_s=10.0)
    network.start(0, "a", "x", 100, 0.0)
    network.start(1, "a", "x", 100, 0.0)
    assert _drain(network) == [Delivery(0, 0.0, 11.0, 100), Delivery(1, 1.0, 12.0, 100)]


def test_jitter_spreads_arrivals_about_the_delay_by_its_seed_and_lets_nobody_overtake() -> None:
    def ends(seed: int) -> list[float]:
        network = _network(delay_s=1.0, jitter_s=0.5, seed=seed)
        for n in range(200):
            network.start(n, "a", "x", 1, 0.0)
        arrived = _drain(network)
        assert [delivery.transfer_id for delivery in arrived] == list(range(200))
        return [delivery.end_s for delivery in arrived]

    lateness = [end_s - (n + 1) / 100 for n, end_s in enumerate(ends(seed=1))]
    assert ends(seed=1) == ends(seed=1) != ends(seed=2)
    assert min(lateness) >= 0.5
    assert max(lateness) <= 1.5
    assert max(lateness) - min(lateness) > 0.3


def test_each_message_costs_its_time_before_its_first_byte_and_leaves_the_nic_to_others() -> None:
    network = _network()
    network.start(0, "a", "x", 100, 0.0, message_s=0.5)
    network.start(1, "a", "x", 100, 0.0, message_s=0.5)
    network.start("other", "b", "x", 75, 1.0, message_s=0.5)
    assert _drain(network) == [
        Delivery(0, 0.5, 1.5, 100),
        Delivery("other", 1.5, 2.5, 75),  # alone at x until 2.0, then half
        Delivery(1, 2.0, 3.25, 100),
    ]


def test_what_a_pair_does_not_use_while_it_prepares_a_message_goes_to_others_at_once() -> None:
    network = _network()
    network.start(0, "a", "x", 100, 0.0, message_s=1.0)
    network.start(1, "a", "x", 100, 0.0, message_s=1.0)
    network.start("other", "b", "x", 200, 0.0, message_s=1.0)
    # Halves from 1.0 to 3.0, then the other's last 100 bytes alone.
    assert _drain(network) == [Delivery(0, 1.0, 3.0, 100), Delivery("other", 1.0, 4.0, 200), Delivery(1, 4.0, 5.0, 100)]


def test_ends_a_microsecond_apart_are_two_instants() -> None:
    network = _network(egress=1e6, ingress=1e6)
    network.start("t", "a", "x", 1_000_001, 0.0)
    network.start("u", "b", "y", 1_000_000, 0.0)
    assert _drain(network) == [Delivery("u", 0.0, 1.0, 1_000_000), Delivery("t", 0.0, 1.000001, 1_000_001)]


def test_nothing_takes_time_where_nothing_is_limited() -> None:
    network = _network(egress=None, ingress=None, delay_s=0.1)
    for n, pair in enumerate(["ax", "ax", "bx", "ay"]):
        network.start(n, pair[0], pair[1], 10**9, 2.0)
    assert network.next_event_s() == 2.0
    assert network.advance(2.0) == []
    assert sorted(_ends(network).items()) == [(n, 2.1) for n in range(4)]


def test_a_transfer_of_no_bytes_waits_its_turn() -> None:
    network = _network()
    network.start("bytes", "a", "x", 100, 0.0)
    network.start("none", "a", "x", 0, 0.0)
    assert _drain(network) == [Delivery("bytes", 0.0, 1.0, 100), Delivery("none", 1.0, 1.0, 0)]


def test_what_has_arrived_before_is_returned_late_but_with_its_own_time() -> None:
    network = _network()
    network.start("t", "a", "x", 100, 0.0)
    network.start("u", "b", "y", 100, 7.0)
    assert network.next_event_s() == 1.0
    assert network.advance(7.0) == [Delivery("t", 0.0, 1.0, 100)]


def test_two_thousand_frames_back_to_back_add_up_to_a_nanosecond() -> None:
    network = _network(egress=1.25e9, ingress=1.25e9)
    for n in range(2000):
        network.start(n, "a", "x", 1 << 20, 1000.0)
    deliveries = []
    while (instant := network.next_event_s()) is not None:
        deliveries += network.advance(instant)
    network.check_integrity()
    assert len(deliveries) == 2000
    assert deliveries[-1].end_s == pytest.approx(1000.0 + 2000 * (1 << 20) / 1.25e9, abs=1e-9)


# --- cancel and misuse ----------------------------------------------------------------------------------------


def test_cancelling_the_head_lets_the_next_one_start() -> None:
    network = _network()
    network.start("head", "a", "x", 100, 0.0)
    network.start("next", "a", "x", 100, 0.0)
    network.cancel("head", 0.5)
    network.check_integrity()
    assert _drain(network) == [Delivery("next", 0.5, 1.5, 100)]


def test_cancelling_a_head_alone_gives_its_share_back() -> None:
    network = _network()
    network.start("t", "a", "x", 100, 0.0)
    network.start("u", "b", "x", 100, 0.0)
    network.cancel("t", 1.0)
    assert network.rates_bytes_per_s() == {("b", "x"): 100.0}
    assert _ends(network) == {"u": 1.5}


def test_cancelling_what_waits_or_flies_removes_just_that() -> None:
    network = _network(delay_s=5.0)
    for n in range(3):
        network.start(n, "a", "x", 100, 0.0)
    network.cancel(1, 0.5)  # waiting
    network.cancel(0, 1.5)  # sent, in flight
    network.check_integrity()
    assert _drain(network) == [Delivery(2, 1.0, 7.0, 100)]
    network.start(0, "a", "x", 100, 8.0)
    assert _ends(network) == {0: 14.0}


def test_cancelling_what_has_arrived_or_never_was_does_nothing() -> None:
    network = _network()
    network.start("t", "a", "x", 100, 0.0)
    network.cancel("unknown", 0.5)
    network.cancel("t", 1.0)
    assert network.advance(1.0) == [Delivery("t", 0.0, 1.0, 100)]
    network.cancel("t", 2.0)
    network.check_integrity()
    assert network.next_event_s() is None


def test_misuse_is_refused() -> None:
    network = _network()
    network.start("t", "a", "x", 100, 1.0)
    with pytest.raises(ValueError, match="already under way"):
        network.start("t", "a", "x", 100, 1.0)
    with pytest.raises(ValueError, match="no link a -> nowhere"):
        network.start("u", "a", "nowhere", 100, 1.0)
    with pytest.raises(ValueError, match="-1 bytes"):
        network.start("u", "a", "x", -1, 1.0)
    with pytest.raises(ValueError, match="time went back"):
        network.advance(0.5)
    network.check_integrity()
    with pytest.raises(ValueError, match="above 0"):
        _network(egress=0.0)
    with pytest.raises(ValueError, match="0 or more"):
        _network(delay_s=-1.0)


# --- whole runs -----------------------------------------------------------------------------------------------

# Few nodes and many bytes in little time, so that pairs meet.
parts_lists = st.lists(
    st.builds(
        Part,
        source=st.sampled_from("ab"),
        destination=st.sampled_from("xy"),
        ready_s=st.integers(0, 20).map(lambda tenths: tenths / 10),
        nbytes=st.one_of(st.integers(100, 2000), st.just(0)),
    ),
    min_size=6,
    max_size=24,
)
finite = st.floats(10.0, 1000.0)
finite_maps = st.tuples(
    st.fixed_dictionaries(dict.fromkeys("abc", finite)), st.fixed_dictionaries(dict.fromkeys("xyz", finite))
)


@given(
    parts=parts_lists,
    both=finite_maps,
    message_s=st.sampled_from([0.0, 0.05]),
    dropped=st.sets(st.integers(0, 24), max_size=4),
)
@examples(100)
def test_every_byte_is_carried_once_at_rates_that_the_nics_have(
    parts: list[Part], both: tuple[Caps, Caps], message_s: float, dropped: set[int]
) -> None:
    """Integrates the rates from outside, event by event, and compares with what was delivered and when."""
    network = FairShareNetwork(egress_bytes_per_s=both[0], ingress_bytes_per_s=both[1])
    order = sorted(range(len(parts)), key=lambda n: parts[n].ready_s)
    cancelled = {n for n in order if n in dropped}
    # Cancelled half a second after they were ready, if not delivered by then.
    plan = [(parts[n].ready_s, 0, n) for n in order] + [(parts[n].ready_s + 0.5, 1, n) for n in cancelled]
    carried: dict[Pair, float] = defaultdict(float)
    deliveries: list[Delivery] = []
    now_s = 0.0
    for at_s, what, n in [*sorted(plan), (math.inf, 2, -1)]:
        while (instant := network.next_event_s()) is not None and instant <= at_s:
            for pair, rate in network.rates_bytes_per_s().items():
                carried[pair] += rate * (instant - now_s)
            deliveries += network.advance(instant)
            now_s = instant
            network.check_integrity()
        if what < 2:
            for pair, rate in network.rates_bytes_per_s().items():
                carried[pair] += rate * (at_s - now_s)
            now_s = at_s
            if what == 0:
                network.start(n, parts[n].source, parts[n].destination, parts[n].nbytes, at_s, message_s=message_s)
            else:
                network.cancel(n, at_s)
            network.check_integrity()
    got = {delivery.transfer_id: delivery for delivery in deliveries}
    assert len(got) == len(deliveries)
    assert set(order) - cancelled <= got.keys() <= set(order)
    assert [d.end_s for d in deliveries] == sorted(d.end_s for d in deliveries)
    for pair in itertools.product("ab", "xy"):
        mine = [n for n in order if (parts[n].source, parts[n].destination) == pair]
        arrived = sum(parts[n].nbytes for n in mine if n in got)
        lost = sum(parts[n].nbytes for n in mine if n not in got)
        assert arrived - 1e-6 <= carried[pair] <= arrived + lost + 1e-6
        in_turn = [got[n] for n in mine if n in got]
        for delivery, n in zip(in_turn, [n for n in mine if n in got], strict=True):
            assert delivery.start_s >= parts[n].ready_s + message_s - 1e-9
            assert delivery.nbytes == parts[n].nbytes
        for before, after in itertools.pairwise(in_turn):
            assert after.start_s >= before.end_s + message_s - 1e-9


@given(parts=parts_lists)
@examples(60)
def test_a_receiver_shared_by_all_never_idles_while_bytes_wait(parts: list[Part]) -> None:
    """With one receiver as the only limit, its busy periods follow from ready times and sizes alone."""
    to_x = [Part(part.source, "x", part.ready_s, part.nbytes) for part in parts]
    ends = expected_ends(to_x, egress_bytes_per_s=dict.fromkeys("abc"), ingress_bytes_per_s={"x": 100.0})
    clear_s = 0.0
    for part in sorted(to_x, key=lambda part: part.ready_s):
        clear_s = max(clear_s, part.ready_s) + part.nbytes / 100.0
    assert max(ends) == pytest.approx(clear_s, abs=1e-9)
    assert all(end_s >= part.ready_s + part.nbytes / 100.0 - 1e-9 for part, end_s in zip(to_x, ends, strict=True))


def test_expected_ends_come_in_the_order_given() -> None:
    parts = [Part("a", "x", 3.0, 100), Part("a", "x", 0.0, 100), Part("b", "x", 0.0, 100), Part("a", "x", 3.0, 50)]
    caps: Caps = {"a": 100.0, "b": 100.0}
    ends = expected_ends(parts, egress_bytes_per_s=caps, ingress_bytes_per_s={"x": 100.0}, delay_s=0.5)
    assert ends == [4.5, 2.5, 2.5, 5.0]
    assert expected_ends([], egress_bytes_per_s=caps, ingress_bytes_per_s={}) == []


def test_the_order_in_which_pairs_start_changes_no_time() -> None:
    parts = [Part(s, d, 0.0, 100 * (n + 1)) for n, (s, d) in enumerate(itertools.product("abc", "xyz"))]
    ends = [
        dict(
            zip(
                order,
                expected_ends(
                    order,
                    egress_bytes_per_s={"a": 70.0, "b": 90.0, "c": 110.0},
                    ingress_bytes_per_s={"x": 33.0, "y": 77.0, "z": None},
                ),
                strict=True,
            )
        )
        for order in (parts, parts[::-1])
    ]
    assert ends[0] == ends[1]

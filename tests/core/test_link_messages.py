"""Messages on the modelled network: what they cost, how many are on the way, and how those share their pair's rate."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.deployments import TransferOrder
from emulator.core.fair_share import Pair
from emulator.core.link import Delivery, FairShareNetwork, Part, expected_ends
from tests.examples import examples

RATE = 100.0


def _network(max_in_flight: int = 1, order: TransferOrder = "fifo") -> FairShareNetwork:
    rates = dict.fromkeys("abxy", RATE)
    return FairShareNetwork(
        egress_bytes_per_s=rates, ingress_bytes_per_s=rates, max_in_flight=max_in_flight, order=order
    )


def _drain(network: FairShareNetwork, now_s: float = 0.0) -> dict[object, Delivery]:
    deliveries = []
    while (instant := network.next_event_s()) is not None:
        now_s = max(now_s, instant)
        deliveries += network.advance(now_s)
        network.check_integrity()
    return {delivery.transfer_id: delivery for delivery in deliveries}


def _ends(network: FairShareNetwork, now_s: float = 0.0) -> dict[object, float]:
    return {name: delivery.end_s for name, delivery in _drain(network, now_s).items()}


# --- closed forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 8, 32])
@pytest.mark.parametrize("cost_s", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("nbytes", [10, 400])
def test_a_pipeline_ends_with_the_last_group_or_with_its_first_and_all_messages(
    groups: int, cost_s: float, nbytes: int
) -> None:
    """Layer by layer: G messages, the i-th ready at i·T/G, of o seconds and b bytes each."""
    computing_s = 4.0
    network = _network()
    for n in range(1, groups + 1):
        network.start(n, "a", "x", nbytes, n * computing_s / groups, request="r", message_s=cost_s)
    each_s = cost_s + nbytes / RATE
    expected = max(computing_s + each_s, computing_s / groups + groups * each_s)
    assert max(_ends(network, computing_s).values()) == pytest.approx(expected)


def test_costs_of_several_messages_pass_side_by_side_and_their_bytes_go_one_after_the_other() -> None:
    network = _network(max_in_flight=2)
    for name in "rst":
        network.start(name, "a", "x", 100, 0.0, message_s=1.0)
    # t takes r's place at 2.0, when its cost begins; it is due when s is through.
    assert _ends(network) == {"r": 2.0, "s": 3.0, "t": 4.0}


def test_two_that_share_fairly_have_half_each_and_the_third_follows_the_first_that_ends() -> None:
    network = _network(2, "fair")
    for name, nbytes in (("r", 100), ("s", 300), ("t", 100)):
        network.start(name, "a", "x", nbytes, 0.0)
    # r and s have half each until 2.0, s and t until 4.0; s has all for its last 100 bytes.
    assert _drain(network) == {
        "r": Delivery("r", 0.0, 2.0, 100),
        "t": Delivery("t", 2.0, 4.0, 100),
        "s": Delivery("s", 0.0, 5.0, 300),
    }


def test_whoever_is_due_later_shares_from_then_on() -> None:
    network = _network(2, "fair")
    network.start("r", "a", "x", 200, 0.0)
    network.start("s", "a", "x", 100, 0.0, message_s=1.0)
    assert _drain(network) == {"r": Delivery("r", 0.0, 3.0, 200), "s": Delivery("s", 1.0, 3.0, 100)}


def test_a_pair_has_one_share_of_a_nic_however_many_of_its_messages_flow() -> None:
    network = _network(4, "fair")
    for n in range(3):
        network.start(n, "a", "x", 50, 0.0)
    network.start("other", "b", "x", 150, 0.0)
    assert network.rates_bytes_per_s() == {("a", "x"): 50.0, ("b", "x"): 50.0}
    assert _ends(network) == {0: 3.0, 1: 3.0, 2: 3.0, "other": 3.0}


@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_a_request_between_its_messages_does_not_hold_up_what_is_complete(order: TransferOrder) -> None:
    network = _network(order=order)
    network.start("r1", "a", "x", 100, 0.0, request="r")
    network.start("s1", "a", "x", 100, 0.5, request="s")
    network.start("r2", "a", "x", 100, 5.0, request="r")
    assert _ends(network, 5.0) == {"r1": 1.0, "s1": 2.0, "r2": 6.0}


@pytest.mark.parametrize(("order", "expected"), [("fifo", "r1 r2 r3 s1 s2"), ("fair", "r1 s1 r2 s2 r3")])
def test_one_at_a_time_goes_by_readiness_or_by_request_in_turn(order: TransferOrder, expected: str) -> None:
    network = _network(order=order)
    for name in ("r1", "r2", "r3", "s1", "s2"):
        network.start(name, "a", "x", 100, 0.0, request=name[0])
    assert list(_ends(network)) == expected.split()


def test_dropping_one_that_shares_leaves_its_rate_to_the_others_and_its_place_to_the_next() -> None:
    network = _network(2, "fair")
    for name in "rst":
        network.start(name, "a", "x", 100, 0.0)
    network.cancel("r", 1.0)
    network.check_integrity()
    # s has 50 bytes left and shares with t until 2.0; then t has all for its last 50.
    assert _drain(network, 1.0) == {"s": Delivery("s", 0.0, 2.0, 100), "t": Delivery("t", 1.0, 2.5, 100)}


def test_dropping_one_that_pays_its_cost_gives_its_place_away() -> None:
    network = _network()
    network.start("r", "a", "x", 100, 0.0, message_s=10.0)
    network.start("s", "a", "x", 100, 0.0, message_s=1.0)
    network.cancel("r", 2.0)
    network.check_integrity()
    assert _ends(network, 2.0) == {"s": 4.0}


def test_a_replay_shares_what_was_on_the_way_together() -> None:
    parts = [Part("a", "x", 0.0, 100, "r"), Part("a", "x", 0.0, 100, "s"), Part("a", "x", 0.5, 100, "r")]
    replay = partial(expected_ends, parts, egress_bytes_per_s={"a": RATE}, ingress_bytes_per_s={"x": RATE})
    assert replay() == [1.0, 2.0, 3.0]
    # The second part of r waits for its first, whatever else is free.
    assert replay(max_in_flight=2, order="fair") == [2.0, 2.0, 3.0]


def test_a_cost_that_cannot_be_is_refused() -> None:
    network = _network()
    for cost_s in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be 0 or more"):
            network.start("t", "a", "x", 100, 0.0, message_s=cost_s)
    with pytest.raises(ValueError, match="max_in_flight must be 1 or more"):
        _network(0).start("t", "a", "x", 100, 0.0)


@given(sizes=st.lists(st.integers(1, 2_000), min_size=1, max_size=8))
def test_those_who_share_all_the_time_end_as_even_shares_say(sizes: list[int]) -> None:
    """Each ends when it and every other one has sent as much as it has, or all."""
    network = _network(8, "fair")
    for n, nbytes in enumerate(sizes):
        network.start(n, "a", "x", nbytes, 0.0)
    ends = _ends(network)
    for n, nbytes in enumerate(sizes):
        assert ends[n] == pytest.approx(sum(min(nbytes, other) for other in sizes) / RATE)


# --- whole runs -----------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A message of a request from one node to another; some are dropped half a second after they are ready."""

    pair: Pair
    request: str
    ready_s: float
    nbytes: int
    cost_s: float
    dropped: bool


messages = st.lists(
    st.builds(
        Sent,
        pair=st.tuples(st.sampled_from("ab"), st.sampled_from("xy")),
        request=st.sampled_from("rst"),
        ready_s=st.integers(0, 20).map(lambda tenths: tenths / 10),
        nbytes=st.one_of(st.integers(10, 400), st.just(0)),
        cost_s=st.sampled_from([0.0, 0.0, 0.1, 0.7]),
        dropped=st.integers(0, 5).map(lambda n: n == 0),
    ),
    min_size=4,
    max_size=24,
)


def _run(sent: list[Sent], network: FairShareNetwork) -> tuple[dict[int, Delivery], dict[Pair, float]]:
    """What was delivered, and the bytes that the rates carried between each pair, integrated from outside."""
    carried: dict[Pair, float] = defaultdict(float)
    got: dict[int, Delivery] = {}
    plan = [(message.ready_s, 0, n) for n, message in enumerate(sent)]
    plan += [(message.ready_s + 0.5, 1, n) for n, message in enumerate(sent) if message.dropped]
    now_s = 0.0

    def count(until_s: float) -> float:
        for pair, rate in network.rates_bytes_per_s().items():
            carried[pair] += rate * (until_s - now_s)
        return until_s

    for at_s, what, n in [*sorted(plan), (math.inf, 2, -1)]:
        while (instant := network.next_event_s()) is not None and instant <= at_s:
            now_s = count(instant)
            got.update({int(str(d.transfer_id)): d for d in network.advance(instant)})
            network.check_integrity()
        if what == 2:
            break
        now_s = count(at_s)
        message = sent[n]
        if what == 0:
            name = (message.pair, message.request)
            network.start(n, *message.pair, message.nbytes, at_s, request=name, message_s=message.cost_s)
        else:
            network.cancel(n, at_s)
        network.check_integrity()
    return got, carried


@given(sent=messages, cap=st.integers(1, 3), order=st.sampled_from(["fifo", "fair"]))
@examples(200)
def test_every_byte_is_carried_once_by_as_many_messages_as_may_be_on_the_way(
    sent: list[Sent], cap: int, order: TransferOrder
) -> None:
    got, carried = _run(sent, _network(cap, order))
    assert {n for n, message in enumerate(sent) if not message.dropped} <= got.keys()
    for pair in itertools.product("ab", "xy"):
        mine = [n for n, message in enumerate(sent) if message.pair == pair]
        arrived = sum(sent[n].nbytes for n in mine if n in got)
        lost = sum(sent[n].nbytes for n in mine if n not in got)
        assert arrived - 1e-6 <= carried[pair] <= arrived + lost + 1e-6
        spans = [(got[n].start_s - sent[n].cost_s, got[n].end_s) for n in mine if n in got]
        for start_s, _ in spans:
            assert sum(a <= start_s < b - 1e-9 for a, b in spans) <= cap, "paying or flowing"
        for request in "rst":
            own = sorted((n for n in mine if n in got and sent[n].request == request), key=lambda n: sent[n].ready_s)
            for before, after in itertools.pairwise(own):
                assert got[after].start_s >= got[before].end_s + sent[after].cost_s - 1e-9, "in sequence"
    for n, delivery in got.items():
        assert delivery.nbytes == sent[n].nbytes
        assert delivery.start_s >= sent[n].ready_s + sent[n].cost_s - 1e-9


@given(sent=messages, cap=st.integers(2, 5))
@examples(100)
def test_without_costs_fifo_is_one_after_the_other_whatever_the_limit(sent: list[Sent], cap: int) -> None:
    free = [message._replace(cost_s=0.0) for message in sent]
    assert _run(free, _network(cap)) == _run(free, _network())


@given(sent=messages)
@examples(60)
def test_one_at_a_time_is_fair_as_it_is_fifo_where_every_request_is_one_message(sent: list[Sent]) -> None:
    alone = [message._replace(request=str(n)) for n, message in enumerate(sent)]
    assert _run(alone, _network(order="fair")) == _run(alone, _network())

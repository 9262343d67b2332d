"""Probes: each pair in turn, three tries, a tolerance of 3 %, and the likely cause when a link is not as asked."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.messages import LinkProbe, OpenProbe, ProbeDone, ProbeOpened, SendProbe
from emulator.core.probe import ATTEMPTS, PINGS, Probe, Prober, ProbeSend, probe_bytes
from emulator.core.run_spec import NicSpec
from emulator.core.specs import Scale
from tests.builders import load_plan, node_spec, run_spec


def _prober(prefills: int = 1, decodes: int = 1) -> Prober:
    nodes = [node_spec(f"prefill-{i}", role="prefill") for i in range(prefills)]
    nodes += [node_spec(f"decode-{i}", role="decode") for i in range(decodes)]
    return Prober.of(run_spec(nodes, load_plan(), payload_bytes_per_s=1e9 / 8))


def test_a_probe_is_a_fifth_of_a_second_within_its_bounds() -> None:
    assert probe_bytes(1e9 / 8) == 25_000_000
    assert probe_bytes(5e9 / 8) == 50_000_000
    assert probe_bytes(1e8 / 8) == 20_000_000
    assert probe_bytes(1e6 / 8) == 250_000, "never more than two seconds of link time"


def test_every_pair_is_probed_one_after_the_other() -> None:
    prober = _prober(prefills=2, decodes=2)
    sends = prober.start()
    seen = []
    while sends:
        (opened,) = sends
        assert opened.message == OpenProbe(PINGS, 25_000_000)
        (sent,) = prober.handle(ProbeOpened("tcp://127.0.0.1:1", (1, 2)))
        assert sent.message == SendProbe("tcp://127.0.0.1:1", (1, 2), 25_000_000)
        seen.append((sent.node, opened.node))
        sends = prober.handle(ProbeDone(0.2, (0.0001,)))
    assert seen == [(p, d) for p in ("prefill-0", "prefill-1") for d in ("decode-0", "decode-1")]
    assert prober.finished
    assert [(done.source, done.destination) for done in prober.done] == seen


def test_a_pair_outside_the_tolerance_may_try_again_and_counts_as_it_last_was() -> None:
    prober = _prober()
    prober.start()
    slow = ProbeDone(1.0, ())
    for _ in range(ATTEMPTS - 1):
        assert prober.handle(slow) == [ProbeSend("decode-0", OpenProbe(PINGS, 25_000_000))]
    assert prober.handle(slow) == []
    assert prober.finished
    assert prober.done[0].seconds == 1.0


def test_a_colocated_run_has_nothing_to_probe() -> None:
    prober = Prober.of(run_spec([node_spec()], load_plan()))
    assert prober.finished
    assert prober.start() == []


@pytest.mark.parametrize(("factor", "problem"), [(1.0, None), (0.975, None), (1.029, None)])
def test_within_three_per_cent_is_as_asked(factor: float, problem: None) -> None:
    assert _probe(achieved_bps=1e9 * factor).problem() is problem


@pytest.mark.parametrize(("factor", "cause"), [(1.04, "not shaped"), (0.96, "CPU bound"), (30.0, "wrong interface")])
def test_a_wrong_rate_names_the_pair_both_figures_and_the_cause(factor: float, cause: str) -> None:
    problem = _probe(achieved_bps=1e9 * factor).problem()
    assert problem is not None
    assert "prefill-0 → decode-0" in problem
    assert f"{factor:.3f} Gbps" in problem
    assert "1.000 Gbps" in problem
    assert cause in problem


def test_a_delay_may_be_a_fifth_of_a_millisecond_late_but_not_early() -> None:
    assert _probe(asked_delay_s=0.005, delay_s=0.0053).problem() is None
    assert "5.400 ms" in (_probe(asked_delay_s=0.005, delay_s=0.0054).problem() or "")
    assert "4.900 ms" in (_probe(asked_delay_s=0.005, delay_s=0.0049).problem() or "")
    assert _probe(asked_delay_s=0.0, delay_s=0.002).problem() is None, "no delay was asked for"


def test_what_was_measured_is_told_in_model_terms() -> None:
    run = _prober().run
    run = msgspec.structs.replace(run, scale=Scale(time=4.0, bytes=10.0))
    seen = LinkProbe("prefill-0", "decode-0", nbytes=25_000_000, seconds=1.0, ping_s=(0.02, 0.004))
    probe = Probe.of(seen, run)
    assert probe.achieved_bps == pytest.approx(25e6 * 8 * 10 * 4)
    assert probe.delay_s == pytest.approx(0.001)


def test_each_pair_is_held_against_the_slower_of_its_two_nics() -> None:
    run = _prober(prefills=2).run
    assert run.link is not None
    own = {"prefill-1": NicSpec(egress_bps=2e8, ingress_bps=1e9)}
    run = msgspec.structs.replace(run, link=msgspec.structs.replace(run.link, own=own))
    asked = {}
    for source in ("prefill-0", "prefill-1"):
        seen = LinkProbe(source, "decode-0", nbytes=20_000_000, seconds=0.8, ping_s=())
        asked[source] = Probe.of(seen, run)
    assert asked["prefill-0"].asked_bps == 1e9
    assert asked["prefill-1"].asked_bps == 2e8
    assert asked["prefill-0"].problem() is not None, "0.2 Gbps where 1 Gbps were asked for"
    assert asked["prefill-1"].problem() is None


def test_jitter_widens_what_a_delay_and_the_time_of_the_bytes_may_be() -> None:
    def seen(delay_s: float, factor: float) -> str | None:
        return _probe(achieved_bps=1e9 * factor, asked_delay_s=0.005, delay_s=delay_s, jitter_s=0.001).problem()

    assert seen(0.0041, 1.0) is None
    assert seen(0.0062, 1.0) is None
    assert seen(0.0039, 1.0) is not None
    assert seen(0.0064, 1.0) is not None
    assert seen(0.005, 0.966) is None, "1 ms of 0.2 s is half a per cent more"
    assert seen(0.005, 0.96) is not None


def _probe(
    *, achieved_bps: float = 1e9, asked_delay_s: float = 0.0, delay_s: float = 0.0, jitter_s: float = 0.0
) -> Probe:
    return Probe(
        source="prefill-0",
        destination="decode-0",
        asked_bps=1e9,
        achieved_bps=achieved_bps,
        asked_delay_s=asked_delay_s,
        delay_s=delay_s,
        took_s=0.2,
        jitter_s=jitter_s,
    )

"""Buckets, plans, rates on either basis, and the commands printed for users."""

from __future__ import annotations

import pytest

from emulator.core.errors import ConfigError
from emulator.core.pacing import payload_bits_per_s
from emulator.core.shaping import (
    Bucket,
    DelayLine,
    ShapePlan,
    delay_line,
    ifb_name,
    line_rate_bps,
    plan_as_held,
    retransmitted_segments,
    tc_commands,
    undo_commands,
)

ADDRESS = "10.0.0.2"


@pytest.mark.parametrize(
    ("rate_bps", "burst_bytes"),
    [(8, 73728 + 1), (1e8, 73728 + 3125), (1e9, 73728 + 31250), (10e9, 73728 + 312500)],
)
def test_burst_holds_an_offloaded_packet_and_250_microseconds(rate_bps: float, burst_bytes: int) -> None:
    bucket = Bucket.of(rate_bps)
    assert bucket == Bucket(round(rate_bps / 8), burst_bytes, 64 * 2**20)


def test_line_rate_of_either_basis() -> None:
    assert line_rate_bps(10e9, "line") == 10e9
    assert payload_bits_per_s(line_rate_bps(10e9, "payload"), "line") == pytest.approx(10e9)


@pytest.mark.parametrize("address", ["10.0.0.2", "fd00::2"])
def test_plan_takes_addresses(address: str) -> None:
    plan = ShapePlan(address, egress_bps=1e9)
    assert plan.egress == Bucket.of(1e9)
    assert plan.ingress is None
    assert plan.congestion_control == "cubic"


@pytest.mark.parametrize("address", ["eth0", "10.0.0.0/24", "", "127.0.0.1", "::1"])
def test_plan_refuses_what_is_no_address_of_a_network(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot shape at"):
        ShapePlan(address, egress_bps=1e9)


@pytest.mark.parametrize("rate_bps", [0.0, -1e9, float("inf"), float("nan"), 7.9])
def test_plan_refuses_rates_that_cannot_be(rate_bps: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        ShapePlan(ADDRESS, ingress_bps=rate_bps)


@pytest.mark.parametrize(("delay_s", "jitter_s"), [(-1e-3, 0.0), (1e-3, 2e-3), (1e-3, -1e-3), (float("nan"), 0.0)])
def test_plan_refuses_times_that_cannot_be(delay_s: float, jitter_s: float) -> None:
    with pytest.raises(ConfigError, match="delay"):
        ShapePlan(ADDRESS, egress_bps=1e9, delay_s=delay_s, jitter_s=jitter_s)


def test_delay_line_keeps_the_order_under_jitter() -> None:
    assert delay_line(ShapePlan(ADDRESS, egress_bps=1e9)) is None
    plain = delay_line(ShapePlan(ADDRESS, egress_bps=1e11, delay_s=50e-6))
    assert plain is not None
    assert (plain.delay_us, plain.jitter_us, plain.ordered_bytes_per_s) == (50, 0, 0)
    jittered = delay_line(ShapePlan(ADDRESS, egress_bps=1e9, delay_s=50e-6, jitter_s=10e-6))
    assert jittered is not None
    assert jittered.ordered_bytes_per_s * 8 > 34e9


@pytest.mark.parametrize("egress_bps", [None, 40e9])
def test_jitter_is_left_to_the_receiver_where_netem_would_reorder(egress_bps: float | None) -> None:
    assert delay_line(ShapePlan(ADDRESS, egress_bps=egress_bps, delay_s=1e-3, jitter_s=1e-4)) is None


@pytest.mark.parametrize("index", [2, 999_999, 1_234_567])
def test_ifb_name_fits_the_kernel(index: int) -> None:
    assert ifb_name(index).startswith("pdemu-ifb")
    assert len(ifb_name(index)) <= 15


def test_commands_for_both_directions_and_a_delay() -> None:
    plan = ShapePlan(ADDRESS, egress_bps=1e9, ingress_bps=2e9, delay_s=5e-3)
    assert tc_commands(plan, "eth1", "pdemu-ifb3", prefix="10.0.0.0/24", delay_by="kernel") == [
        "tc qdisc add dev eth1 root handle 7064: tbf rate 1000000000bit burst 104978 limit 67108864",
        "tc qdisc add dev eth1 parent 7064:1 handle 7065: netem limit 44325 delay 5000us",
        "ip link add pdemu-ifb3 type ifb",
        "ip link set pdemu-ifb3 up",
        "tc qdisc add dev pdemu-ifb3 root handle 7064: tbf rate 2000000000bit burst 136228 limit 67108864",
        "tc qdisc add dev eth1 handle ffff: ingress",
        "tc filter add dev eth1 parent ffff: protocol all prio 1 u32 match u32 0 0 "
        "action mirred egress redirect dev pdemu-ifb3",
        "ip route replace 10.0.0.0/24 dev eth1 proto kernel scope link src 10.0.0.2 congctl cubic",
    ]
    assert undo_commands(plan, "eth1", "pdemu-ifb3", prefix="10.0.0.0/24", delay_by="kernel") == [
        "tc qdisc del dev eth1 root",
        "tc qdisc del dev eth1 ingress",
        "ip link del pdemu-ifb3",
        "ip route replace 10.0.0.0/24 dev eth1 proto kernel scope link src 10.0.0.2",
    ]


def test_commands_leave_the_other_direction_and_the_receivers_delay_alone() -> None:
    plan = ShapePlan(ADDRESS, ingress_bps=1e9, delay_s=5e-3)
    text = "\n".join(tc_commands(plan, "eth1", "pdemu-ifb3", prefix="10.0.0.0/24", delay_by="receiver"))
    assert "netem" not in text
    assert "dev eth1 root" not in text


def test_plan_read_back_is_the_plan() -> None:
    plan = ShapePlan(ADDRESS, egress_bps=1e9, ingress_bps=5e9, delay_s=50e-6)
    assert plan_as_held(ADDRESS, plan.egress, plan.ingress, DelayLine(50, 0, 1000, 0), "cubic") == plan


def test_retransmissions_from_the_namespaces_counters() -> None:
    snmp = "Ip: Forwarding\nIp: 1\nTcp: InSegs OutSegs RetransSegs InErrs\nTcp: 10 20 3 0\nUdp: In\nUdp: 1\n"
    assert retransmitted_segments(snmp) == 3
    with pytest.raises(ValueError, match="no TCP counters"):
        retransmitted_segments("Ip: Forwarding\nIp: 1\n")

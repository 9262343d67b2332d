"""Held KV by groups of layers: bytes that are computed, and those that leave for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emulator.core.effects import Effect, Transmit
from emulator.core.outgoing import Outgoing


def _leaves(effects: list[Effect]) -> list[tuple[int, int]]:
    """From which byte on, and how many."""
    return [(effect.offset, effect.nbytes) for effect in effects if isinstance(effect, Transmit)]


@given(
    chunks=st.lists(st.integers(1, 500), min_size=1, max_size=6),
    bytes_per_token=st.integers(1, 5_000),
    layers=st.integers(1, 100),
    groups=st.integers(1, 100),
    ticket_at=st.integers(0, 40),
)
def test_whatever_the_sizes_all_bytes_leave_once_in_order_and_none_before_it_is_computed(
    chunks: list[int], bytes_per_token: int, layers: int, groups: int, ticket_at: int
) -> None:
    groups = min(groups, layers)
    outgoing = Outgoing("layer", bytes_per_token, layers, groups)
    outgoing.expect("a", sum(chunks))
    now_s, done, parts = 0.0, 0, []
    for chunk in chunks:
        for number in range(1, groups + 1):
            now_s += 1.0
            if now_s == ticket_at:
                parts += _leaves(outgoing.ticket("a", 7, "there", "decode-0", now_s))
            if number < groups:
                parts += _leaves(outgoing.computed_groups("a", done, chunk, number, now_s))
                computed = (done + chunk * outgoing.progress[number - 1]) * bytes_per_token
            else:
                done += chunk
                parts += _leaves(outgoing.computed("a", done, now_s))
                computed = done * bytes_per_token
            sent = sum(nbytes for _, nbytes in parts)
            assert sent <= computed + 1e-6
            assert not parts or computed - sent < 1 + 1e-6, "a group whose layers are done has left, but for a byte"
    prefill_end_s = now_s
    if outgoing.ready_s("a") is None:
        assert parts == []
        now_s += 1.0
        parts = _leaves(outgoing.ticket("a", 7, "there", "decode-0", now_s))
        assert len(parts) == 1
        assert outgoing.ready_s("a") == now_s
    else:
        assert outgoing.ready_s("a") == prefill_end_s
    assert [offset for offset, _ in parts] == [sum(n for _, n in parts[:i]) for i in range(len(parts))]
    assert sum(nbytes for _, nbytes in parts) == sum(chunks) * bytes_per_token
    assert all(nbytes > 0 for _, nbytes in parts)
    assert outgoing.is_computed("a")


def test_where_a_prompt_leaves_as_a_whole_groups_change_nothing() -> None:
    outgoing = Outgoing("none", 1_000, layers=4, layer_groups=1)
    assert outgoing.progress == ()
    outgoing.expect("a", 100)
    outgoing.ticket("a", 7, "there", "decode-0", 0.0)
    assert outgoing.computed("a", 60, 1.0) == []
    assert _leaves(outgoing.computed("a", 100, 2.0)) == [(0, 100_000)]


def test_short_prompts_leave_as_a_whole() -> None:
    outgoing = Outgoing("layer", 1_000, layers=4, layer_groups=2, least_tokens=100)
    for request_id, tokens in (("short", 99), ("long", 100)):
        outgoing.expect(request_id, tokens)
        outgoing.ticket(request_id, 7, "there", "decode-0", 0.0)
    assert outgoing.computed_groups("short", 0, 99, 1, 0.1) == []
    assert _leaves(outgoing.computed_groups("long", 0, 100, 1, 0.1)) == [(0, 50_000)]
    assert _leaves(outgoing.computed("short", 99, 0.2)) == [(0, 99_000)]

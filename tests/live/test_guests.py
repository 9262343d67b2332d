"""What the router keeps of its guests' requests: enough for the records of those that never hand in their own."""

from __future__ import annotations

from emulator.core.messages import Finished, Submit, TokenCount, Tokens
from emulator.live.guests import GuestRecords


def _guests() -> GuestRecords:
    """Two guests: one has had a request to its end and has another one under way, the other has one."""
    guests = GuestRecords()
    guests.heard("here", Submit("a", 10, 2), 1.0)
    guests.heard("gone", Submit("b", 20, 2), 1.5)
    guests.heard("gone", Submit("c", 30, 5), 2.0)
    guests.told("gone", Tokens((TokenCount("b", 1), TokenCount("c", 1))), 2.5)
    guests.told("gone", Tokens((TokenCount("b", 1),)), 3.0)
    guests.told("gone", Finished("b", "length", "", "prefill-0", "decode-0"), 3.0)
    return guests


def test_the_requests_of_a_guest_that_hands_in_none_are_as_the_router_saw_them() -> None:
    guests = _guests()
    guests.handed_in("here")
    guests.told("gone", Finished("c", "aborted"), 4.0)
    guests.cut(9.0)
    whole, broken = guests.records()
    assert (whole.request_id, whole.stream, whole.scheduled_s, whole.sent_s) == ("b", "gone", 1.5, 1.5)
    assert (whole.prompt_tokens, whole.max_tokens, whole.decode_node) == (20, 2, "decode-0")
    assert (whole.outcome, whole.first_token_s, whole.finish_s, whole.token_times_s) == (
        "completed",
        2.5,
        3.0,
        [2.5, 3],
    )
    assert (broken.request_id, broken.outcome, broken.reason, broken.output_tokens) == ("c", "failed", "aborted", 1)


def test_what_comes_after_the_record_is_not_in_it() -> None:
    guests = _guests()
    guests.cut(4.0)
    guests.heard("gone", Submit("late", 10, 2), 5.0)
    guests.told("gone", Finished("c", "aborted"), 6.0)
    assert {record.request_id: record.outcome for record in guests.records()} == {
        "a": "unfinished",
        "b": "completed",
        "c": "unfinished",
    }

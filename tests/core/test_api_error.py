"""How the endpoint tells why a request was not served."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.api_error import not_served
from emulator.core.messages import FailureCause


@pytest.mark.parametrize(
    ("cause", "status", "kind", "code"),
    [
        ("impossible", 400, "invalid_request_error", "context_length_exceeded"),
        ("unavailable", 503, "service_unavailable_error", None),
        ("timeout", 504, "timeout_error", None),
        (None, 500, "server_error", None),
    ],
)
def test_a_cause_is_a_status_and_a_type(cause: FailureCause | None, status: int, kind: str, code: str | None) -> None:
    error = not_served(cause, "because of this")
    assert error.status == status
    told = msgspec.json.decode(error.body())["error"]
    assert (told["type"], told["code"], told["param"]) == (kind, code, None)
    assert told["message"].endswith("because of this")

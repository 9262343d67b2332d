"""What the endpoint refuses, in OpenAI's form: a status and a JSON object that its clients turn into exceptions."""

from __future__ import annotations

import msgspec

from emulator.core.messages import FailureCause

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
TOO_LONG = "context_length_exceeded"
"""The code by which OpenAI's clients know a request that will never fit."""

_STATUSES: dict[FailureCause | None, int] = {"impossible": 400, "unavailable": 503, "timeout": 504, None: 500}


class ApiError(Exception):
    """A request that is not served: HTTP status, what is wrong, and with which parameter."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> bytes:
        """The JSON document."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that its sender has to mend."""
    return ApiError(400, message, param=param, code=code)


def not_served(cause: FailureCause | None, detail: str) -> ApiError:
    """A request that the cluster failed to serve, and why; without a cause nobody expected it."""
    if cause == "impossible":
        return invalid(f"this cluster can never serve it: {detail}", code=TOO_LONG)
    return ApiError(_STATUSES[cause], f"the cluster did not serve it: {detail}")

"""What the endpoint refuses, in OpenAI's form: a status and a JSON object that its clients turn into exceptions."""

from __future__ import annotations

import msgspec

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "service_unavailable_error",
}


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

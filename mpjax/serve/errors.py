"""Errors of requests, in the form that OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

from mpjax.files.json_text import in_utf8

# OpenAI's error codes that clients check.
MODEL_NOT_FOUND = "model_not_found"
TOO_LONG = "context_length_exceeded"
WRONG_API_KEY = "invalid_api_key"
UNKNOWN_KEY = "unknown_parameter"
NOT_OFFERED = "unsupported_parameter"


class RequestError(ValueError):
    """A request that can't be served.

    parameter: the wrong key of the body, or None. status: of HTTP. code: OpenAI's error code, or
    None. Lone surrogates, which JSON allows and UTF-8 does not, are escaped in the message.
    """

    def __init__(
        self,
        message: str,
        parameter: str | None = None,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(in_utf8(message))
        self.parameter = None if parameter is None else in_utf8(parameter)
        self.status, self.code = status, code

    @property
    def as_object(self) -> dict[str, Any]:
        """The JSON body of the error response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}
        return {"error": error}

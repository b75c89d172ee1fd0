"""Why a request is refused or has failed, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any

from mpjax.files.json_text import in_utf8

# The codes of OpenAI that clients look for.
MODEL_NOT_FOUND = "model_not_found"
TOO_LONG = "context_length_exceeded"
WRONG_API_KEY = "invalid_api_key"
UNKNOWN_KEY = "unknown_parameter"
NOT_OFFERED = "unsupported_parameter"


class RequestError(ValueError):
    """A request that can't be served.

    parameter: the key of the body that is wrong, if one is. status: of HTTP. code: a text by which
    programs know the error, or None. Half of a surrogate pair, which a key or a value in JSON may
    have and an answer in UTF-8 may not, is spelled out.
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
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}
        return {"error": error}

"""Errors of requests, and how OpenAI's API reports them."""

from __future__ import annotations

from typing import Any

from vlmfast.engine.prefiller import TooLong
from vlmfast.errors import DeadlineExceeded, VLMFastError, is_out_of_memory

_TYPES = {  # of other statuses: invalid_request_error
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class RequestError(Exception):
    """A request that is not answered.

    Parameters
    ----------
    message : str
        One line: the argument, what was wrong and what is allowed. Sent to the client, so that it
        contains no path and no content of the request beyond a short excerpt.
    status : int
        Of HTTP.
    param : str, optional
        The argument, such as ``messages[0].content[1].image_url``.
    code : str, optional
        For programs, such as ``model_not_found``.
    retry_after : int, optional
        Seconds after which the request may succeed.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        # It may quote the request.
        message = "".join(char if char.isprintable() else "?" for char in message)
        super().__init__(message)
        self.message, self.status, self.param = message, status, param
        self.code, self.retry_after = code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's API reports it."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def busy(reason: str) -> RequestError:
    """The error of a request that exceeds what clients may use at the same time."""
    text = f"{reason}; try later"
    return RequestError(text, 429, code="rate_limit_exceeded", retry_after=1)


def as_request_error(error: Exception) -> RequestError:
    """The error that a client sees; nothing is told of a defect."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DeadlineExceeded):
        return RequestError(str(error), 408, code="timeout")
    if is_out_of_memory(error):
        return RequestError(
            "the memory is too small for this request beside those that are running; try later",
            503,
            code="out_of_memory",
            retry_after=5,
        )
    if isinstance(error, VLMFastError):
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return RequestError(str(error), code=code)
    return RequestError("the server failed to answer this request", 500, code="internal_error")

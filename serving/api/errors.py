"""Errors of requests, in the form that OpenAI's clients read."""

from typing import Any

LONGEST = 64  # characters of a field's name


class RequestError(Exception):
    """A request that is not answered.

    status: of HTTP. code: a word for programs. param: the field that is at fault.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code or None
        # a field's name is the client's: it may be long, and cut in the middle of a character
        self.param = None if param is None else param.encode(errors="replace").decode()[:LONGEST]

    @property
    def body(self) -> dict[str, Any]:
        """The error as the JSON object of an answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kinds.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


class QueueFullError(RequestError):
    """A request that finds the queue full."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"{waiting} requests are waiting already (max_waiting). Try again later.",
            status=429,
            code="queue_full",
        )


class StoppedError(RequestError):
    """A request that the server cannot finish, because it stops."""

    def __init__(self) -> None:
        super().__init__("the server is stopping. Try again later.", status=503, code="stopping")

"""How a request fails: code -> status, title, when to come back. One table, on the client's own.

Codes are raised as Refusal in the front end, and come from workers as frames.Failure.

A process without a file descriptor or mapping to spare is as full as its queue, and for the same
reason: more requests than it can hold. It answers queue_full, which may be tried again.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashwire.errors import STATUS

_TITLES = {
    "malformed": "The bytes are not what they claim",
    "unauthorized": "A key is needed",
    "forbidden": "This key may not do this",
    "not_found": "Not found",
    "method_not_allowed": "Method not allowed",
    "request_timeout": "The upload is too slow",
    "gone": "The residual is gone",
    "too_large": "The body is too large",
    "unsupported_media_type": "Unsupported media type",
    "invalid": "The request describes no attention",
    "unsupported_backend": "The named backend cannot run this",
    "quarantined": "This request has killed workers",
    "queue_full": "The queue is full",
    "headers_too_large": "The headers are too large",
    "internal": "Internal error",
    "no_worker": "No worker is ready",
    "worker_died": "The worker died",
    "draining": "The server is shutting down",
    "too_many_connections": "Too many connections",
    "deadline_exceeded": "The deadline has passed",
    "not_enough_memory": "Not enough memory",
}
# Seconds until a caller may try again, where the failure itself does not say.
_RETRY_AFTER = {
    "queue_full": 1.0,
    "no_worker": 2.0,
    "worker_died": 2.0,
    "draining": 5.0,
    "too_many_connections": 2.0,
}

EXHAUSTED = "the server holds as many requests as the system gives it file descriptors for"
_EXHAUSTION = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def is_exhaustion(error: BaseException) -> bool:
    """Whether the system has no descriptor or mapping to give for now."""
    return isinstance(error, OSError) and error.errno in _EXHAUSTION


@dataclass(frozen=True, slots=True)
class Row:
    """What a code means over HTTP. `retry_after` in seconds, None where trying again is no help."""

    status: int
    title: str
    retry_after: float | None


ROWS: Mapping[str, Row] = {
    code: Row(status, _TITLES[code], _RETRY_AFTER.get(code)) for code, status in STATUS.items()
}


class Refusal(Exception):
    """A request ends in this error.

    code         a key of ROWS
    detail       what is wrong, with the value and the limit
    field        the option or tensor it is about, dotted when nested
    reasons      every reason, where there can be several
    retry_after  seconds; the code's own when None
    headers      further HTTP headers of the reply
    """

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        reasons: Sequence[str] = (),
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.row = ROWS[code]
        self.code = code
        self.detail = detail
        self.field = field
        self.reasons = tuple(reasons)
        self.retry_after = self.row.retry_after if retry_after is None else retry_after
        self.headers = dict(headers or {})
        super().__init__(detail)

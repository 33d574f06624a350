"""Everything that can go wrong, one class per `code` of a reply.

FlashwireError
+-- ConnectionLost              no server there, or the connection broke; retries are used up
|   +-- TransportTimeout        the server was silent for longer than the caller allows
+-- UnexpectedReply             a reply that no flashwire server gives: a proxy's page, say
+-- SecondDerivative            a gradient of a gradient was asked for (flashwire.torch)
+-- RequestError                a refusal: by the server, or by the client before sending
    +-- Malformed               malformed, 400
    +-- Unauthorized            unauthorized, 401
    +-- Forbidden               forbidden, 403
    +-- NotFound                not_found, 404
    +-- MethodNotAllowed        method_not_allowed, 405
    +-- RequestTimeout          request_timeout, 408
    +-- Gone                    gone, 410
    +-- TooLarge                too_large, 413
    +-- UnsupportedMediaType    unsupported_media_type, 415
    +-- Invalid                 invalid, 422
    +-- UnsupportedBackend      unsupported_backend, 422
    +-- Quarantined             quarantined, 422
    +-- QueueFull               queue_full, 429
    +-- HeadersTooLarge         headers_too_large, 431
    +-- Internal                internal, 500
    +-- NoWorker                no_worker, 503
    +-- WorkerDied              worker_died, 503
    +-- Draining                draining, 503
    +-- TooManyConnections      too_many_connections, 503
    +-- DeadlineExceeded        deadline_exceeded, 504
    +-- NotEnoughMemory         not_enough_memory, 507

A code this version does not know raises RequestError itself. `STATUS` is the table of codes and
statuses, for the service too.

What goes well, but not as it was meant to, is a FlashwireWarning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar


class FlashwireError(Exception):
    """Root of everything that flashwire raises on its own account."""


class FlashwireWarning(UserWarning):
    """Results are right, and came about in a costlier way than was meant."""


class ConnectionLost(FlashwireError):
    """The server could not be reached, or went away before its reply was complete.

    detail   which server, and what happened
    hint     what to look at, if anything
    tries    how often it was tried
    """

    def __init__(self, detail: str, hint: str = "") -> None:
        self.detail = detail
        self.hint = hint
        self.tries = 1
        super().__init__(detail, hint)

    def __str__(self) -> str:
        text = self.detail if self.tries == 1 else f"{self.detail} ({self.tries} tries)"
        return f"{text}. {self.hint}" if self.hint else text


class TransportTimeout(ConnectionLost):
    """The server did not connect, take bytes or answer in time."""


class UnexpectedReply(FlashwireError):
    """What came back is not a reply of flashwire's. `status` is the HTTP status, if any."""

    def __init__(
        self, detail: str, status: int | None = None, retry_after: float | None = None
    ) -> None:
        self.status = status
        self.retry_after = retry_after
        super().__init__(detail)


class SecondDerivative(FlashwireError):
    """Attention over the wire is differentiable once."""

    def __init__(self, detail: str = "second derivatives of attention are not available") -> None:
        super().__init__(detail)


class RequestError(FlashwireError):
    """A request was refused.

    code          stable word for the kind of failure
    status        HTTP status
    detail        what is wrong, with the value and the limit
    field         option or tensor it is about, if any (dotted when nested)
    reasons       every reason, where there can be several
    request_id    for asking the operator; None when the client refused before sending
    retry_after   seconds the server asks to wait, if it does
    """

    code: ClassVar[str] = ""
    default_status: ClassVar[int] = 0

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        field: str | None = None,
        reasons: Sequence[str] = (),
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.status = self.default_status if status is None else status
        self.detail = detail
        self.field = field
        self.reasons = tuple(reasons)
        self.request_id = request_id
        self.retry_after = retry_after
        super().__init__(self._message())

    def _message(self) -> str:
        text = self.detail
        if self.field is not None and not re.search(rf"\b{re.escape(self.field)}\b", text):
            text = f"{self.field}: {text}"
        more = [reason for reason in self.reasons if reason not in self.detail]
        if more:
            text += " (" + "; ".join(more) + ")"
        if self.request_id is not None:
            text += f" [{self.status}, request {self.request_id}]"
        return text


class Malformed(RequestError):
    """Bytes that are not what they claim."""

    code = "malformed"
    default_status = 400


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    code = "unauthorized"
    default_status = 401


class Forbidden(RequestError):
    """The key may not do this."""

    code = "forbidden"
    default_status = 403


class NotFound(RequestError):
    """No such route, or an id that was never given out to this key."""

    code = "not_found"
    default_status = 404


class MethodNotAllowed(RequestError):
    """The route exists and does not answer this method."""

    code = "method_not_allowed"
    default_status = 405


class RequestTimeout(RequestError):
    """The upload was slower than the server's minimum rate."""

    code = "request_timeout"
    default_status = 408


class Gone(RequestError):
    """A residual that was genuine and is no more: expired, freed, or the server restarted."""

    code = "gone"
    default_status = 410


class TooLarge(RequestError):
    """The body is over the server's limit."""

    code = "too_large"
    default_status = 413


class UnsupportedMediaType(RequestError):
    """A media type or content encoding that the server does not speak."""

    code = "unsupported_media_type"
    default_status = 415


class Invalid(RequestError):
    """Well-formed and meaningless: a missing, unknown or wrong option, shapes that do not fit."""

    code = "invalid"
    default_status = 422


class UnsupportedBackend(RequestError):
    """The named backend cannot run this request; `reasons` says why, completely."""

    code = "unsupported_backend"
    default_status = 422


class Quarantined(RequestError):
    """This very request has killed workers, and is not tried again."""

    code = "quarantined"
    default_status = 422


class QueueFull(RequestError):
    """The server's queue is full."""

    code = "queue_full"
    default_status = 429


class HeadersTooLarge(RequestError):
    """The HTTP headers are over the server's limit."""

    code = "headers_too_large"
    default_status = 431


class Internal(RequestError):
    """A fault of the server's own: worth a report with the request id."""

    code = "internal"
    default_status = 500


class NoWorker(RequestError):
    """No worker is ready."""

    code = "no_worker"
    default_status = 503


class WorkerDied(RequestError):
    """The worker died under the request, and no other could take it in time."""

    code = "worker_died"
    default_status = 503


class Draining(RequestError):
    """The server is shutting down."""

    code = "draining"
    default_status = 503


class TooManyConnections(RequestError):
    """All connections that the server keeps are in use."""

    code = "too_many_connections"
    default_status = 503


class DeadlineExceeded(RequestError):
    """The caller's deadline passed; the work was dropped."""

    code = "deadline_exceeded"
    default_status = 504


class NotEnoughMemory(RequestError):
    """The request needs more device memory than there is."""

    code = "not_enough_memory"
    default_status = 507


BY_CODE: Mapping[str, type[RequestError]] = {cls.code: cls for cls in RequestError.__subclasses__()}
STATUS: Mapping[str, int] = {code: cls.default_status for code, cls in BY_CODE.items()}

"""What every request passes through: its id, web origins, counting, and a last catch.

Pure ASGI, around all routes. Keys are checked in app.py, where the documentation shows them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect

from flashwire_service import meter
from flashwire_service.errors import EXHAUSTED, Refusal, is_exhaustion
from flashwire_service.front import headers as reply_headers
from flashwire_service.front import problems, replies
from flashwire_service.front.answered import Answered
from flashwire_service.front.incoming import KEY as INCOMING
from flashwire_service.front.incoming import Incoming
from flashwire_service.front.lent import Lent
from flashwire_service.front.metrics import Metrics
from flashwire_service.logs import Log

if TYPE_CHECKING:
    from flashwire_service.front.traces import Traces

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_QUIET = ("/healthz", "/readyz", "/metrics")  # asked every few seconds: logged at debug
_SKIPPED = 64 * 1024  # bytes of a body
_CLIENT_LEFT = 499  # for the log and metrics; nobody is there to receive it
_LEFT = "disconnected"  # and the code of it
_ALLOWED_HEADERS = "authorization, content-type, flashwire-timeout-ms, x-request-id"
_EXPOSED_HEADERS = "x-request-id, retry-after"


@dataclass(slots=True)
class _Exchange:
    """One request on its way."""

    id: str
    origin: str | None  # an allowed one
    started: float
    body_read: bool  # all of it, or what is left is little enough to be skipped
    incoming: Incoming | Lent | None = None  # a body that may come past `receive`
    received: int = 0
    sent: int = 0
    status: int = 0

    @property
    def all_received(self) -> int:
        return self.received + (self.incoming.received if self.incoming else 0)

    @property
    def has_all(self) -> bool:
        return self.body_read or (self.incoming is not None and self.incoming.complete)


class Edge:
    """Wraps the application. Never raises: a fault of ours becomes a problem with code internal."""

    def __init__(
        self,
        app: App,
        origins: tuple[str, ...],
        metrics: Metrics,
        log: Log,
        traces: Traces | None = None,
    ) -> None:
        self._app = app
        self._origins = origins
        self._metrics = metrics
        self._log = log
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = _Exchange(
            id=request_id(headers),
            origin=self._allowed(headers.get("origin")),
            started=time.monotonic(),
            body_read=_is_skippable(headers),
            incoming=scope.get(INCOMING),
        )
        scope.setdefault("state", {})["request_id"] = exchange.id
        receive, send = _counted(exchange, scope["scheme"] == "https", receive, send)
        self._metrics.meter.add(meter.IN_FLIGHT, 1)
        try:
            if exchange.origin and _is_preflight(scope, headers):
                await _answer_preflight(send)
            else:
                await self._app(scope, receive, send)
        except ClientDisconnect:
            exchange.status = _CLIENT_LEFT
        except asyncio.CancelledError:  # uvicorn does this once the grace period has passed
            if exchange.status:
                raise
            refusal = Refusal("draining", "the server is shutting down")
            await _refuse(exchange, refusal, scope, receive, send)
        except Exception as exc:  # the last catch
            await self._failed(exchange, exc, scope, receive, send)
        finally:
            self._metrics.meter.add(meter.IN_FLIGHT, -1)
            self._done(exchange, scope)

    def _allowed(self, origin: str | None) -> str | None:
        if origin is None or not self._origins:
            return None
        return origin if origin in self._origins or "*" in self._origins else None

    async def _failed(
        self, exchange: _Exchange, exc: Exception, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """A fault of ours. Where it happened is for the log; no value of the request is."""
        frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(exc.__traceback__)]
        self._log.error(
            "fault", request_id=exchange.id, exception=type(exc).__name__, at=frames[-4:]
        )
        if exchange.status:  # the reply has begun: cut it off rather than pass it for whole
            raise ConnectionAbortedError from exc
        if is_exhaustion(exc):
            refusal = Refusal("queue_full", EXHAUSTED)
        else:
            refusal = Refusal("internal", "a fault of the server's; the request id is in its log")
        await _refuse(exchange, refusal, scope, receive, send)

    def _done(self, exchange: _Exchange, scope: Scope) -> None:
        """Count the request, trace it, and log its one line."""
        request = _answered(exchange, scope)
        self._metrics.answered(request)
        quiet = request.route in _QUIET
        line = request.line()
        if self._traces is not None and not quiet:
            line["trace_id"] = self._traces.record(request)
        (self._log.debug if quiet else self._log.info)("request", **line)


def _answered(exchange: _Exchange, scope: Scope) -> Answered:
    """What has become of it: access.py, app.py and problems.py have left their part in `state`."""
    state = scope["state"]
    caller = state.get("caller")
    status = exchange.status or _CLIENT_LEFT
    return Answered(
        request_id=exchange.id,
        headers=Headers(scope=scope),
        scheme=scope["scheme"],
        method=known_method(scope["method"]),
        route=getattr(scope.get("route"), "path", "unmatched"),
        status=status,
        code=_LEFT if status == _CLIENT_LEFT else state.get("code", ""),
        key="" if caller is None else caller.name,
        received=exchange.all_received,
        sent=exchange.sent,
        began=exchange.started,
        ended=time.monotonic(),
        answer=state.get("answer"),
    )


async def _refuse(
    exchange: _Exchange, refusal: Refusal, scope: Scope, receive: Receive, send: Send
) -> None:
    scope["state"]["code"] = refusal.code
    await problems.response(refusal, exchange.id)(scope, receive, send)


def request_id(headers: Headers) -> str:
    """The caller's own id when it is one, else a fresh one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def known_method(method: str) -> str:
    """A method as a label; what HTTP does not know would make the labels unbounded."""
    known = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")
    return method if method in known else "_OTHER"


def _is_skippable(headers: Headers) -> bool:
    """Whether a body that nobody reads may be skipped, so that the connection can be kept.

    A client that expects 100 may never send it: then what follows cannot be told.
    """
    if "transfer-encoding" in headers or "expect" in headers:
        return False
    return int(headers.get("content-length", "0")) <= _SKIPPED


def _counted(
    exchange: _Exchange, secure: bool, receive: Receive, send: Send
) -> tuple[Receive, Send]:
    """The same channel, seen by the exchange, which adds its headers to the reply; `secure` when
    it is TLS.
    """
    security = reply_headers.of_reply(secure=secure)

    async def counting_receive() -> Event:
        event = await receive()
        if event["type"] == "http.request":
            exchange.received += len(event.get("body", b""))
            exchange.body_read = exchange.body_read or not event.get("more_body", False)
        return event

    async def counting_send(event: Event) -> None:
        if event["type"] == "http.response.start":
            exchange.status = event["status"]
            headers = MutableHeaders(raw=event.setdefault("headers", []))
            headers["x-request-id"] = exchange.id
            for name, value in security.items():
                headers.setdefault(name, value)
            if not exchange.has_all:  # what is still coming must not be taken for a request
                headers["connection"] = "close"
            if exchange.origin:
                headers["access-control-allow-origin"] = exchange.origin
                headers["access-control-expose-headers"] = _EXPOSED_HEADERS
                headers.add_vary_header("origin")
        elif event["type"] == "http.response.body":
            exchange.sent += len(event.get("body", b""))
        elif event["type"] == replies.FROM_MEMORY:
            exchange.sent += event["count"]
        await send(event)

    return counting_receive, counting_send


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


async def _answer_preflight(send: Send) -> None:
    allow = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", _ALLOWED_HEADERS.encode()),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allow})
    await send({"type": "http.response.body"})

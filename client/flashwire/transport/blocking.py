"""Transport for httpx.Client: the steps of an exchange, waited for by the calling thread."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import httpx

from flashwire.transport.connection import Steps, Wait, poll, tune
from flashwire.transport.exchange import Body, Next, Open, Queue, exchange
from flashwire.transport.pool import Pool

T = TypeVar("T")
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)  # httpx's own
REPLY = "flashwire.reply"  # the extension of a response that holds its body's stream


class Transport(httpx.BaseTransport):
    """HTTP/1.1 over TCP, TLS or a unix socket, without proxies. For any number of threads.

    uds     path of a unix socket that all requests go to
    limits, verify, cert, trust_env   as for httpx.HTTPTransport

    The extension "flashwire.reply" of a response is its body's stream, which can also be received
    into a buffer: Reply.fill.
    """

    def __init__(
        self,
        *,
        uds: str | None = None,
        limits: httpx.Limits = LIMITS,
        verify: Any = True,
        cert: Any = None,
        trust_env: bool = True,
    ) -> None:
        self._uds = uds
        self._pool = Pool(limits, threading.Event)
        self._context = functools.cache(
            lambda: alpn(httpx.create_ssl_context(verify, cert, trust_env))
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        chunks = iter(request.stream)  # type: ignore[arg-type]
        steps = exchange(self._pool, request, self._context)
        head, body = self._run(steps, chunks)
        reply = Reply(self._pool, body)
        return httpx.Response(
            head.status,
            headers=head.headers,
            stream=reply,
            extensions={
                "http_version": b"HTTP/" + head.version,
                "reason_phrase": head.reason,
                REPLY: reply,
            },
        )

    def close(self) -> None:
        self._pool.close()

    def _run(self, steps: Steps[T], chunks: Iterator[Any]) -> T:
        return run(steps, lambda step: self._answer(step, chunks))

    def _answer(self, step: object, chunks: Iterator[Any]) -> object:
        if isinstance(step, Next):
            return next(chunks, None)
        if isinstance(step, Queue):
            return step.turn.event.wait(step.timeout)  # type: ignore[attr-defined]
        if isinstance(step, Open):
            return self._open(step)
        raise TypeError(f"unknown step: {step!r}")

    def _open(self, step: Open) -> socket.socket:
        try:
            if self._uds is None:
                sock = socket.create_connection(step.origin[1:], step.timeout)
            else:
                sock = _unix(self._uds, step.timeout)
            tune(sock)
        except TimeoutError as exc:
            raise httpx.ConnectTimeout(str(exc)) from exc
        except OSError as exc:
            raise httpx.ConnectError(str(exc)) from exc
        sock.setblocking(False)
        return sock


class Reply(httpx.SyncByteStream):
    """A reply's body. `length` is its size; None when only its end will tell."""

    def __init__(self, pool: Pool, body: Body) -> None:
        self.length = body.length
        self._pool = pool
        self._body: Body | None = body

    def __iter__(self) -> Iterator[bytes]:
        while self._body is not None and (piece := self._run(self._body.piece())):
            yield piece

    def fill(self, target: memoryview) -> None:
        """Receive the body, none of which has been read, into a buffer of its length."""
        if self._body is not None:
            self._run(self._body.fill(target))

    def close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            release(self._pool, body)

    def _run(self, steps: Steps[T]) -> T:
        try:
            return run(steps)
        except BaseException:
            self.close()
            raise


def release(pool: Pool, body: Body) -> None:
    """The reply has been read, or nobody wants the rest of it."""
    if body.reusable:
        pool.keep(body.connection)
    else:
        pool.drop(body.connection)


def run(steps: Steps[T], answer: Any = None) -> T:
    """Go through the steps to their result; `answer` has the answers to those that are no Wait."""
    try:
        step = next(steps)
        while True:
            try:
                answered = poll(step) if isinstance(step, Wait) else answer(step)
            except BaseException as exc:
                step = steps.throw(exc)
            else:
                step = steps.send(answered)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def alpn(context: Any) -> Any:
    context.set_alpn_protocols(["http/1.1"])
    return context


def _unix(path: str, timeout: float | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock

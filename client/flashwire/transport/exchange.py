"""A request and its reply as steps: what is waited for is asked of whoever runs them.

Nothing here knows whether it is a thread or an event loop that waits.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from flashwire.transport import heads
from flashwire.transport.connection import Connection, Steps
from flashwire.transport.content import Content
from flashwire.transport.pool import Origin, Pool, Turn
from flashwire.wire import Buffer

_PIECE = 64 * 1024
Context = Callable[[], ssl.SSLContext]
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Queue:
    """Wait for `turn`, for so many seconds. To be answered with whether it came."""

    turn: Turn
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Open:
    """Open a socket to `origin` that does not block. To be answered with it. Raises httpx's
    ConnectError and ConnectTimeout.
    """

    origin: Origin
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Next:
    """The next chunk of the request's body is wanted, None at the end."""


class Body:
    """The body of a reply, as it comes."""

    def __init__(
        self, head: heads.Head, connection: Connection, reusable: bool, timeout: float | None
    ) -> None:
        self.length = head.length
        self.connection = connection
        self._head = head
        self._timeout = timeout
        self._left = head.length or 0  # of the body, or of the chunk
        self._within = False  # a chunk, whose end still has to come
        self._complete = head.length == 0
        self._reusable = reusable

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on the connection."""
        return self._reusable and self._complete

    def piece(self) -> Steps[bytes]:
        """What comes next, b"" at the end."""
        if self._complete:
            return b""
        if self._head.chunked and not self._left and not (yield from self._next_chunk()):
            self._complete = True
            return b""
        framed = self._head.chunked or self.length is not None
        most = min(_PIECE, self._left) if framed else _PIECE
        piece = yield from self.connection.some(most, self._timeout)
        if framed:
            if not piece:
                raise _cut_off(self._received(), self.length)
            self._left -= len(piece)
        self._complete = not self._left and not self._head.chunked if framed else not piece
        return piece

    def fill(self, target: memoryview) -> Steps[None]:
        """Receive all of a body whose length is known straight into a buffer of that length."""
        got = yield from self.connection.fill(target, self._timeout)
        self._left -= got
        if got < len(target):
            raise _cut_off(got, self.length)
        self._complete = True

    def _received(self) -> int:
        return (self.length or 0) - self._left

    def _next_chunk(self) -> Steps[bool]:
        """Read up to the next chunk's data; False when there is none."""
        connection = self.connection
        if self._within:
            yield from connection.parsed(heads.end_of_chunk, self._timeout)
        self._left, _ = yield from connection.parsed(heads.of_chunk, self._timeout)
        self._within = self._left > 0
        if not self._within:
            yield from connection.parsed(heads.of_trailers, self._timeout)
        return self._within


def _cut_off(got: int, length: int | None) -> httpx.RemoteProtocolError:
    claim = f"received {got} bytes, expected {length}"
    if length is None:
        claim = "incomplete chunked read"
    return httpx.RemoteProtocolError(
        f"peer closed connection without sending complete message body ({claim})"
    )


def exchange(
    pool: Pool, request: httpx.Request, context: Context
) -> Steps[tuple[heads.Head, Body]]:
    """Send a request and read the head of its reply. `context` makes the ssl.SSLContext, if needed.

    The connection is the body's; whoever reads it gives it back to the pool.
    """
    head = heads.of_request(request)
    length, chunked, closing = heads.framing_of(request.headers.raw)
    timeouts = request.extensions.get("timeout", {})
    connection = yield from _connected(pool, request, timeouts, context)
    try:
        whole = yield from _send(connection, request, head, length, chunked, timeouts.get("write"))
        reply = yield from connection.head(request.method, timeouts.get("read"))
    except BaseException:
        pool.drop(connection)
        raise
    reusable = whole and reply.keep_alive and not closing
    return reply, Body(reply, connection, reusable, timeouts.get("read"))


def _connected(
    pool: Pool, request: httpx.Request, timeouts: dict[str, Any], context: Context
) -> Steps[Connection]:
    """A connection to use, kept or new."""
    url = request.url
    if url.scheme not in _PORTS:
        raise httpx.UnsupportedProtocol(f"{url.scheme!r} is neither http nor https")
    turn = pool.take((url.scheme, url.host, url.port or _PORTS[url.scheme]))
    if not turn.granted:
        try:
            came = yield Queue(turn, timeouts.get("pool"))
        except BaseException:
            pool.give_up(turn)
            raise
        if not came:
            pool.give_up(turn)
            raise httpx.PoolTimeout("no connection became free in time")
    if turn.connection is not None:
        return turn.connection
    connection = None
    try:
        timeout = timeouts.get("connect")
        connection = Connection((yield Open(turn.origin, timeout)), turn.origin)
        if url.scheme == "https":
            name = request.extensions.get("sni_hostname") or url.raw_host.decode("ascii")
            yield from connection.secure(context(), name, timeout)
    except BaseException:
        pool.drop(connection)
        raise
    return connection


def _send(
    connection: Connection,
    request: httpx.Request,
    head: bytes,
    length: int | None,
    chunked: bool,
    timeout: float | None,
) -> Steps[bool]:
    """Whether all was sent. When the server takes no more, its reply says why, if there is one."""
    stream, method = request.stream, request.method
    try:
        if isinstance(stream, Content) and not chunked:
            _count(sum(map(len, stream.buffers)), length, last=True)
            return (yield from connection.send([head, *stream.buffers], method, timeout))
        ahead: list[Buffer] = [head]  # goes with the first chunk
        sent = 0
        while (chunk := (yield Next())) is not None:
            if not len(chunk):
                continue
            sent += len(chunk)
            if not chunked:
                _count(sent, length)
            framed = [b"%x\r\n" % len(chunk), chunk, b"\r\n"] if chunked else [chunk]
            if not (yield from connection.send([*ahead, *framed], method, timeout)):
                return False
            ahead = []
        if not chunked:
            _count(sent, length, last=True)
        end = [b"0\r\n\r\n"] if chunked else []
        return (yield from connection.send([*ahead, *end], method, timeout))
    except httpx.WriteError:
        return False


def _count(sent: int, length: int | None, *, last: bool = False) -> None:
    """Hold a request to its Content-Length."""
    if sent > (length or 0):
        raise httpx.LocalProtocolError("Too much data for declared Content-Length")
    if last and sent < (length or 0):
        raise httpx.LocalProtocolError("Too little data for declared Content-Length")

"""Transports of httpx that place large bodies in memory which the server maps.

Where the server has no side socket, or has none for this caller, all goes the ordinary way, after
one warning.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import AsyncIterator, Iterator
from select import POLLIN, POLLOUT, poll

import httpx

from flashwire.local.connection import Connection, Pool, Received, is_inline
from flashwire.local.frames import SUFFIX

_PIECES_PER_TURN = 16  # of a body, before other tasks of the loop have theirs


class SharedTransport(httpx.BaseTransport):
    """`path` is that of the server's socket of HTTP; `ordinary` speaks HTTP to it."""

    def __init__(self, path: str, ordinary: httpx.BaseTransport) -> None:
        self._pool = Pool(path + SUFFIX)
        self._negotiation = _Negotiation(path + SUFFIX)
        self._ordinary = ordinary

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._negotiation.connection(self._pool)
        if connection is None:
            return self._ordinary.handle_request(request)
        with _exchange(connection, self._pool):
            packet, size = _sync_packet(connection, request)
            timeouts = _Timeouts(request)
            while not connection.send(packet, size):
                timeouts.wait(connection, POLLOUT)
            while (reply := connection.receive()) is None:
                timeouts.wait(connection, POLLIN)
        return _response(reply)

    def close(self) -> None:
        self._pool.close()
        self._ordinary.close()


class AsyncSharedTransport(httpx.AsyncBaseTransport):
    """The same for asyncio and trio."""

    def __init__(self, path: str, ordinary: httpx.AsyncBaseTransport) -> None:
        self._pool = Pool(path + SUFFIX)
        self._negotiation = _Negotiation(path + SUFFIX)
        self._ordinary = ordinary

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._negotiation.connection(self._pool)
        if connection is None:
            return await self._ordinary.handle_async_request(request)
        with _exchange(connection, self._pool):
            packet, size = await _async_packet(connection, request)
            timeouts = _Timeouts(request)
            while not connection.send(packet, size):
                await timeouts.wait_async(connection, POLLOUT)
            while (reply := connection.receive()) is None:
                await timeouts.wait_async(connection, POLLIN)
        return _response(reply)

    async def aclose(self) -> None:
        self._pool.close()
        await self._ordinary.aclose()


class _Negotiation:
    """Whether the side socket is used: asked with each new connection, so a server that comes
    back is found again.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._warned = False

    def connection(self, pool: Pool) -> Connection | None:
        try:
            return pool.take()
        except OSError as e:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"no shared memory with the server: {self._path}: {e.strerror}; "
                    "requests go through its socket",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None


@contextlib.contextmanager
def _exchange(connection: Connection, pool: Pool) -> Iterator[None]:
    """A connection for one exchange, whose errors are made httpx's. Closing it, when anything
    goes wrong, tells the server that nobody waits.
    """
    try:
        yield
    except OSError as e:
        connection.close()
        raise httpx.ReadError(str(e)) from e
    except BaseException:
        connection.close()
        raise
    pool.give_back(connection)


class _Timeouts:
    """How long may be waited for the socket, as the request says."""

    def __init__(self, request: httpx.Request) -> None:
        given = request.extensions.get("timeout", {})
        self._limits = {POLLOUT: given.get("write"), POLLIN: given.get("read")}

    def wait(self, connection: Connection, event: int) -> None:
        limit = self._limits[event]
        poller = poll()
        poller.register(connection.sock, event)
        if not poller.poll(None if limit is None else max(0.0, limit * 1000)):
            raise _timeout(event)

    async def wait_async(self, connection: Connection, event: int) -> None:
        import anyio  # comes with httpx, which also imports it late

        wait = anyio.wait_readable if event == POLLIN else anyio.wait_writable
        with anyio.move_on_after(self._limits[event]) as scope:
            await wait(connection.sock)
        if scope.cancelled_caught:
            raise _timeout(event)


def _timeout(event: int) -> httpx.TimeoutException:
    if event == POLLIN:
        return httpx.ReadTimeout("the server did not answer in time")
    return httpx.WriteTimeout("the server took no packet in time")


def _sync_packet(connection: Connection, request: httpx.Request) -> tuple[bytes, int]:
    """The packet of a request, its body placed when it is large, and the size of such a body."""
    if not isinstance(request.stream, httpx.SyncByteStream):
        raise TypeError("a request with an asynchronous body needs the asynchronous transport")
    size = _announced(request)
    if size is None or is_inline(size):
        body = b"".join(request.stream)
        if is_inline(len(body)):
            return connection.packet(request, body, 0), 0
        placing = _Placing(connection, len(body))
        placing.add(body)
        return placing.packet(request)
    placing = _Placing(connection, size)
    for piece in request.stream:
        placing.add(piece)
    return placing.packet(request)


async def _async_packet(connection: Connection, request: httpx.Request) -> tuple[bytes, int]:
    import anyio.lowlevel

    if not isinstance(request.stream, httpx.AsyncByteStream):
        raise TypeError("a request with a blocking body needs the blocking transport")
    size = _announced(request)
    if size is None or is_inline(size):
        body = b"".join([piece async for piece in request.stream])
        if is_inline(len(body)):
            return connection.packet(request, body, 0), 0
        placing = _Placing(connection, len(body))
        placing.add(body)
        return placing.packet(request)
    placing = _Placing(connection, size)
    number = 0
    async for piece in request.stream:
        placing.add(piece)
        number += 1
        if number % _PIECES_PER_TURN == 0:
            await anyio.lowlevel.checkpoint()
    return placing.packet(request)


class _Placing:
    """A body on its way into a connection's memory."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection = connection
        self._room = connection.room(size)
        self._filled = 0

    def add(self, piece: bytes) -> None:
        end = self._filled + len(piece)
        if end > len(self._room):
            raise httpx.LocalProtocolError("Too much data for declared Content-Length")
        self._room[self._filled : end] = piece
        self._filled = end

    def packet(self, request: httpx.Request) -> tuple[bytes, int]:
        size = len(self._room)
        if self._filled < size:
            raise httpx.LocalProtocolError("Too little data for declared Content-Length")
        self._room.release()
        return self._connection.packet(request, b"", size), size


def _announced(request: httpx.Request) -> int | None:
    given = request.headers.get("content-length")
    return int(given) if given is not None and given.isdecimal() else None


def _response(reply: Received) -> httpx.Response:
    return httpx.Response(reply.status, headers=reply.headers, stream=Whole(reply.body))


class Whole(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that is all here, in one piece that whoever reads it may keep."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body  # type: ignore[misc]  # httpx takes it as it is

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body  # type: ignore[misc]

"""The body of a request, from its socket straight into memory of the application's choice.

uvicorn copies a body four times on its way, in small pieces. Here, once the head is parsed and the
application has said where the body is to lie, the socket is read into that place; only the kernel
copies. The parser sees nothing of it: when the body has come, a new one goes on with what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol as Interface

from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

KEY = "flashwire.incoming"  # of the ASGI scope
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(Interface):
    """What is needed of the protocol that parsed the head."""

    transport: asyncio.Transport
    flow: FlowControl

    def connection_lost(self, exc: Exception | None) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def body_came(self) -> None:
        """All of the body has been read, though not by the parser."""

    def pass_over(self, nbytes: int) -> None:
        """So many bytes of the body are still to come, and nobody wants them."""


class Incoming(asyncio.BufferedProtocol):
    """The body of one request, of `length` bytes as announced. Take it once, or not at all."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle, length: int) -> None:
        self.length = length
        self._connection = connection
        self._cycle = cycle
        self._target = memoryview(b"")
        self._filled = 0
        self._most: Callable[[], int]
        self._awaited: asyncio.Future[None] | None = None
        self.on_left: Callable[[], None] | None = None  # called when the client is gone

    @property
    def left(self) -> bool:
        """Whether the client is gone."""
        return self._cycle.disconnected

    @property
    def received(self) -> int:
        """Bytes that were taken."""
        return self._filled

    def whole(self) -> bytes | None:
        """All of the body, where it came with the head."""
        cycle = self._cycle
        if cycle.more_body or len(cycle.body) != self.length:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        self._filled = self.length
        return body

    @property
    def complete(self) -> bool:
        """Whether all of it has been read."""
        return self._filled == self.length

    async def stream(
        self, target: memoryview, most: Callable[[], int]
    ) -> AsyncGenerator[memoryview, None]:
        """Fill a writable target of `length` bytes; its pieces as they fill, each of `most()` bytes
        at most. No more is read than was asked for. Close it, when it is not exhausted: only then
        nothing writes there any more.

        Raises ClientDisconnect.
        """
        cycle, seen = self._cycle, 0
        parsed, cycle.body = cycle.body, bytearray()
        self._target, self._filled, self._most = target, len(parsed), most
        target[: len(parsed)] = parsed
        if self._filled < self.length and not cycle.disconnected:
            self._take_over()
        try:
            while seen < self.length:
                if self._filled == seen:
                    await self._more()
                start, seen = seen, self._filled
                yield target[start:seen]
        finally:
            if self._filled < self.length and not cycle.disconnected:
                self._receive_by(self._connection)
                self._connection.pass_over(self.length - self._filled)
            self._target = memoryview(b"")

    async def _more(self) -> None:
        """Wait until something has come."""
        if not self._cycle.disconnected:
            self._awaited = asyncio.get_running_loop().create_future()
            self._connection.flow.resume_reading()
            await self._awaited
        if self._cycle.disconnected:
            raise ClientDisconnect

    def _take_over(self) -> None:
        transport = self._connection.transport
        if self._cycle.waiting_for_100_continue and not transport.is_closing():
            transport.write(_CONTINUE)
            self._cycle.waiting_for_100_continue = False
        self._receive_by(self)

    def _receive_by(self, protocol: object) -> None:
        """Reading is stopped then: loops ask a protocol how it receives when reading begins."""
        self._connection.flow.pause_reading()
        self._connection.transport.set_protocol(protocol)  # type: ignore[arg-type]

    def lost(self) -> None:
        """The connection has ended."""
        if self.on_left is not None:
            self.on_left()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    # asyncio.BufferedProtocol, while the body comes

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled : self._filled + self._most()]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < self.length:
            self._connection.flow.pause_reading()
        else:
            self._receive_by(self._connection)
            self._connection.flow.resume_reading()
            self._connection.body_came()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        self._wake()

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

"""One connection to the side socket of a front end, and the idle ones that are kept.

Sockets do not block: who waits for them, and how, is transport.py's.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
from dataclasses import dataclass, field

import httpx

from flashwire.local.frames import (
    MAX_INLINE,
    MAX_PACKET,
    FrameError,
    Reply,
    Request,
    decode_reply,
    encode,
)
from flashwire.local.memory import Outgoing, mapped

_KEPT = 16  # idle connections
_KEPT_S = 30.0  # for so long, with the memory that they hold
_OF_HTTP = frozenset(  # headers about a connection of HTTP's, or said otherwise here
    (b"connection", b"keep-alive", b"content-length", b"transfer-encoding", b"te", b"expect")
)


@dataclass(slots=True)
class Received:
    """A reply whose body is at hand: `body` is writable, and in shared memory when it is large."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: memoryview


class Connection:
    """Carries one exchange at a time. After an exception it is to be closed."""

    def __init__(self, path: str) -> None:
        """Raises OSError when nobody listens there."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.sock.setblocking(False)
            self.sock.connect(path)
        except BaseException:
            self.sock.close()
            raise
        self.idle_since = 0.0
        self._memory: Outgoing | None = None
        self._sent_memory = False  # to the server, which keeps it
        self._buffer = bytearray(MAX_PACKET)

    @property
    def usable(self) -> bool:
        """Whether it may carry another exchange: nothing has come, not even the end."""
        if time.monotonic() - self.idle_since > _KEPT_S:
            return False
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        return not poller.poll(0)

    def room(self, size: int) -> memoryview:
        """Writable memory for a body, larger than what fits a packet. Raises OSError."""
        if self._memory is None or self._memory.size < size:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            self._memory, self._sent_memory = Outgoing(size), False
        return self._memory.view[:size]

    def packet(self, request: httpx.Request, body: bytes, size: int) -> bytes:
        """The packet of a request: `body`, or `size` bytes that were written to the room.

        Raises httpx.LocalProtocolError.
        """
        headers = tuple((n, v) for n, v in request.headers.raw if n.lower() not in _OF_HTTP)
        try:
            return encode(
                Request(
                    method=request.method,
                    target=request.url.raw_path,
                    headers=headers,
                    body=body,
                    size=size,
                )
            )
        except FrameError as e:
            raise httpx.LocalProtocolError(str(e)) from e

    def send(self, packet: bytes, size: int) -> bool:
        """Send it, when there is room in the socket: else False. Raises OSError."""
        fds = []
        if size and self._memory is not None and not self._sent_memory:
            fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._memory.fd]))]
        try:
            self.sock.sendmsg([packet], fds, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # a refusal may have come first, else the end is read
        self._sent_memory = self._sent_memory or bool(fds)
        return True

    def receive(self) -> Received | None:
        """The reply, when it has come. Raises OSError, httpx.RemoteProtocolError."""
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        try:
            size, ancillary, _, _ = self.sock.recvmsg_into(
                [self._buffer], space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        try:
            if not size:
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
            reply = decode_reply(memoryview(self._buffer)[:size])
            headers = [*reply.headers, (b"content-length", b"%d" % (reply.size or len(reply.body)))]
            return Received(reply.status, headers, _body_of(reply, fds))
        except ValueError as e:
            raise httpx.RemoteProtocolError(f"not a reply: {e}") from e
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """The server then lets go of the memory, too, and of what it was asked."""
        self.sock.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _body_of(reply: Reply, fds: array.array[int]) -> memoryview:
    if not reply.size:
        return memoryview(bytearray(reply.body))
    if not fds:
        raise OSError("no descriptor was left for the memory of the reply")
    return mapped(fds[0], reply.size).data


@dataclass(slots=True)
class Pool:
    """Connections to one path. Safe to share between threads."""

    path: str
    _idle: list[Connection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def take(self) -> Connection:
        """One that nobody else uses, new when there is none. Raises OSError."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return Connection(self.path)
            if connection.usable:
                return connection
            connection.close()

    def give_back(self, connection: Connection) -> None:
        """Its exchange is complete."""
        connection.idle_since = time.monotonic()
        with self._lock:
            idle = [*self._idle, connection]
            oldest = connection.idle_since - _KEPT_S
            kept = [] if self._closed else [c for c in idle if c.idle_since > oldest][-_KEPT:]
            self._idle = kept
        for other in (c for c in idle if c not in kept):
            other.close()

    def close(self) -> None:
        """Close the idle ones; one that is in use is closed when it is given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def is_inline(size: int) -> bool:
    """Whether a body of this size travels in its packet."""
    return size <= MAX_INLINE

"""One HTTP/1.1 connection over a socket that never blocks.

Whatever would block is a generator: it yields what it waits for and goes on when told that it came.
`blocking` and `aio` wait each in their way, and everything else is here once. TLS is no different:
a socket of Python's ssl says in its own words what it waits for.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import httpx

from flashwire.transport import heads
from flashwire.wire import Buffer

T = TypeVar("T")
READ, WRITE = 1, 2
_FIRST_READ = 64 * 1024
_AT_ONCE = 64  # buffers in one sendmsg; the least limit among systems is 1024
_RECORD = 16 * 1024  # of TLS
_UNIX_BUFFER = 4 * 2**20  # or what the system allows


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `sock` can be read or written (READ, WRITE or both), for `timeout` seconds; None
    for ever. To be answered with those that came true, 0 when the time has passed.
    """

    sock: socket.socket
    events: int
    timeout: float | None


Steps: TypeAlias = Generator[Any, Any, T]


class Connection:
    """To `origin`, with what has been received and not been used yet.

    expires   when to use it no more, on time.monotonic(); None for never
    """

    def __init__(self, sock: socket.socket, origin: object) -> None:
        self.origin = origin
        self.expires: float | None = None
        self._sock = sock
        self._buffer = bytearray(_FIRST_READ)
        self._start = self._end = 0

    def close(self) -> None:
        self._sock.close()

    @property
    def stale(self) -> bool:
        """Whether an unused connection has something to read: its end, or what nobody asked for."""
        return self._start < self._end or bool(poll(Wait(self._sock, READ, 0)))

    def secure(self, context: ssl.SSLContext, name: str, timeout: float | None) -> Steps[None]:
        """Speak TLS from now on, with a server that proves to be `name`."""
        try:
            sock = context.wrap_socket(
                self._sock, server_hostname=name, do_handshake_on_connect=False
            )
            self._sock = sock
            while True:
                try:
                    sock.do_handshake()
                    return
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
                    if not (yield Wait(sock, _wanted(blocked), timeout)):
                        raise httpx.ConnectTimeout("the TLS handshake timed out") from None
        except OSError as exc:
            raise httpx.ConnectError(str(exc)) from exc

    def send(self, buffers: Sequence[Buffer], method: str, timeout: float | None) -> Steps[bool]:
        """Send all of these. False when the server has refused the request before it had it all:
        then the rest is not sent, and the refusal can be read.
        """
        queue = deque(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))
        watching = READ
        while queue:
            try:
                sent = self._send_some(queue)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
                ready = yield Wait(self._sock, _wanted(blocked) | watching, timeout)
                if not ready:
                    raise httpx.WriteTimeout("the server took no more in time") from None
                if ready & watching:
                    if self._refused(method):
                        return False
                    watching = READ if self._start == self._end else 0
                continue
            except OSError as exc:
                raise httpx.WriteError(str(exc)) from exc
            while sent:
                if sent < len(queue[0]):
                    queue[0] = queue[0][sent:]
                    break
                sent -= len(queue.popleft())
        return True

    def head(self, method: str, timeout: float | None) -> Steps[heads.Head]:
        """The head of the reply to a request of that method. Interim ones are passed over."""
        while True:
            found = heads.of_reply(self._unused, method)
            if found is not None:
                head, size = found
                self._start += size
                if not head.interim:
                    return head
            elif not (yield from self._receive_more(timeout)):
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    def some(self, most: int, timeout: float | None) -> Steps[bytes]:
        """What comes next, b"" at the end."""
        if self._start == self._end and not (yield from self._receive_more(timeout)):
            return b""
        stop = min(self._end, self._start + most)
        taken = bytes(memoryview(self._buffer)[self._start : stop])
        self._start = stop
        return taken

    def fill(self, target: memoryview, timeout: float | None) -> Steps[int]:
        """Receive straight into it; less than all of it only at the end."""
        at = min(self._end - self._start, len(target))
        target[:at] = memoryview(self._buffer)[self._start : self._start + at]
        self._start += at
        while at < len(target):
            got = yield from self._receive(target[at:], timeout)
            if not got:
                break
            at += got
        return at

    def parsed(self, parse: Any, timeout: float | None) -> Steps[Any]:
        """What `parse` finds at the start of what comes: a function of `heads` that returns None
        as long as it needs more. The bytes that it used are the last, or only, item it returns.
        """
        while (found := parse(bytes(self._unused))) is None:
            if not (yield from self._receive_more(timeout)):
                raise httpx.RemoteProtocolError(
                    "peer closed connection without sending complete message body "
                    "(incomplete chunked read)"
                )
        self._start += found if isinstance(found, int) else found[-1]
        return found

    @property
    def _unused(self) -> memoryview:
        return memoryview(self._buffer)[self._start : self._end]

    def _send_some(self, queue: deque[memoryview]) -> int:
        if not isinstance(self._sock, ssl.SSLSocket):
            return self._sock.sendmsg([*queue][:_AT_ONCE])
        while len(queue) > 1 and len(queue[0]) + len(queue[1]) <= _RECORD:
            queue.appendleft(memoryview(bytes(queue.popleft()) + bytes(queue.popleft())))
        return self._sock.send(queue[0])

    def _refused(self, method: str) -> bool:
        """Whether what came before the request was sent means that no more need be sent."""
        try:
            got = self._receive_now()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False  # it was TLS's own
        except OSError:
            return True
        if not got:
            return True
        while (found := heads.of_reply(self._unused, method)) is not None:
            head, size = found
            if not head.interim:
                return head.status >= 400 or not head.keep_alive
            self._start += size
        return False

    def _receive_more(self, timeout: float | None) -> Steps[int]:
        """Receive behind what is unused."""
        got: int = yield from self._receive(self._room(), timeout)
        self._end += got
        return got

    def _receive_now(self) -> int:
        got = self._sock.recv_into(self._room())
        self._end += got
        return got

    def _room(self) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            unused = bytes(self._unused)
            self._buffer = bytearray(unused) + bytearray(max(_FIRST_READ, len(unused)))
            self._start, self._end = 0, len(unused)
        return memoryview(self._buffer)[self._end :]

    def _receive(self, target: memoryview, timeout: float | None) -> Steps[int]:
        """As many bytes as there are, at least one; 0 at the end."""
        while True:
            try:
                return self._sock.recv_into(target)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
                wanted = _wanted(blocked, READ)
            except OSError as exc:
                raise httpx.ReadError(str(exc)) from exc
            if not (yield Wait(self._sock, wanted, timeout)):
                raise httpx.ReadTimeout("the server sent nothing in time")


def _wanted(blocked: OSError, otherwise: int = WRITE) -> int:
    if isinstance(blocked, ssl.SSLWantReadError):
        return READ
    return WRITE if isinstance(blocked, ssl.SSLWantWriteError) else otherwise


def poll(wait: Wait) -> int:
    """Wait, blocking this thread."""
    poller = select.poll()
    events = (select.POLLIN if wait.events & READ else 0) | (
        select.POLLOUT if wait.events & WRITE else 0
    )
    poller.register(wait.sock, events)
    found = poller.poll(None if wait.timeout is None else 1000 * wait.timeout)
    if not found:
        return 0
    happened = found[0][1]
    ready = READ if happened & select.POLLIN else 0
    ready |= WRITE if happened & select.POLLOUT else 0
    return ready or wait.events  # an error, which the next attempt will raise


def tune(sock: socket.socket) -> None:
    """What is written is sent at once; a unix socket holds more of it than its default, which
    stops the sender every 200 KB.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

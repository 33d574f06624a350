"""One request that came through the side door, as the application sees it: like any of HTTP's."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
import struct
import termios
from array import array
from urllib.parse import unquote

from flashwire.local.frames import MAX_INLINE, FrameError, Headers, Reply, Request, encode
from flashwire_service.errors import Refusal
from flashwire_service.front import headers as reply_headers
from flashwire_service.front import problems
from flashwire_service.front.edge import App, Event
from flashwire_service.front.incoming import KEY as INCOMING
from flashwire_service.front.lent import Lent
from flashwire_service.front.replies import FROM_MEMORY
from flashwire_service.ipc.memory import Memory

_NOT_TAKEN = frozenset(  # what a packet says otherwise, and the host, which there is none of
    (b"connection", b"content-length", b"expect", b"host", b"transfer-encoding")
)
_NOT_SENT = frozenset((b"connection", b"content-length"))
_INT = struct.Struct("i")


class Call:
    """A request on its way through the application. `lent` is closed with it."""

    def __init__(self, request: Request, lent: Lent) -> None:
        self._request = request
        self._lent = lent
        self._given = False  # the body, to the application
        self._left = asyncio.Event()
        self._outcome = Outcome()

    def leave(self) -> None:
        """Its caller is gone."""
        self._left.set()
        self._lent.leave()

    async def run(self, app: App) -> Outcome | None:
        """What the application answers, to be closed; None when nothing whole came of it."""
        try:
            await app(self._scope(), self._receive, self._send)
        except ConnectionAbortedError:  # its reply broke off
            pass
        except BaseException:
            self._outcome.close()
            raise
        finally:
            self._lent.close()
        if self._outcome.complete:
            return self._outcome
        self._outcome.close()
        return None

    def _scope(self) -> Event:
        request = self._request
        path, _, query = request.target.partition(b"?")
        headers = [(name, value) for name, value in request.headers if name not in _NOT_TAKEN]
        headers.append((b"host", b"localhost"))
        if self._lent.length:
            headers.append((b"content-length", b"%d" % self._lent.length))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "server": None,
            "client": None,
            "scheme": "http",
            "method": request.method,
            "root_path": "",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": headers,
            "extensions": {FROM_MEMORY: {}},
            INCOMING: self._lent,
        }

    async def _receive(self) -> Event:
        if not self._given and not self._left.is_set():
            piece, more = self._lent.copied()
            self._given = not more
            return {"type": "http.request", "body": piece, "more_body": more}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Event) -> None:
        outcome = self._outcome
        if event["type"] == "http.response.start":
            outcome.status = event["status"]
            outcome.headers = event["headers"]
        elif event["type"] == FROM_MEMORY:
            outcome.fd, outcome.size = os.dup(event["file"]), event["count"]
            outcome.complete = True
        elif event["type"] == "http.response.body":
            if self._request.method != "HEAD":
                outcome.body += event.get("body", b"")
            outcome.complete = not event.get("more_body", False)


class Outcome:
    """A reply: `body`, or `size` bytes of the memory of `fd`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.fd = -1
        self.size = 0
        self.complete = False

    @classmethod
    def of(cls, refusal: Refusal, request_id: str) -> Outcome:
        """What no application was asked about."""
        response = problems.response(refusal, request_id)
        response.headers.update(
            {"x-request-id": request_id, **reply_headers.of_reply(secure=False)}
        )
        outcome = cls()
        outcome.status, outcome.headers = response.status_code, response.raw_headers
        outcome.body += response.body
        return outcome

    def send(self, sock: socket.socket) -> bool:
        """Whether the packet is on its way; a socket that has no room for it is not waited for:
        whoever asks only once the reply before was taken has the room.
        """
        try:
            if len(self.body) > MAX_INLINE:
                with Memory.create() as memory:
                    memory.write([self.body])
                    self.fd, self.size = os.dup(memory.fd), memory.size
                self.body.clear()
            fds = [] if self.fd < 0 else [self.fd]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            sock.sendmsg([self._packet()], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except (OSError, FrameError):
            return False
        return True

    def _packet(self) -> bytes:
        headers: Headers = tuple((n, v) for n, v in self.headers if n.lower() not in _NOT_SENT)
        return encode(
            Reply(status=self.status, headers=headers, body=bytes(self.body), size=self.size)
        )

    def close(self) -> None:
        """Let go of the memory. Harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def fresh_id() -> str:
    """An id for a request that never reached the application."""
    return secrets.token_hex(12)


def unread_bytes(sock: socket.socket) -> int:
    """What was sent on a unix socket and is not yet received at its other end."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT.size))
    (unread,) = _INT.unpack(answer)
    return int(unread)

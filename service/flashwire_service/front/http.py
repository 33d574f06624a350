"""uvicorn's HTTP protocol, with what it answers by itself made ours.

Bytes that are no request, and heads over their limit, get a problem document. A reply given before
the request's body has come is followed by a short lingering, in which the rest of the body is
thrown away: closing at once would reset the connection under the client before it read the reply.

uvicorn times a connection from its first reply on, and only while nothing comes. Here a clock also
runs from the start, and from the first byte of a head to its last: whoever sends nothing, or half a
head, or a byte now and then, does not keep a connection. Nor does whoever does not read a reply.

Connections are counted. One too many takes the place of the one that has been idle for longest, or
is refused where all are in use.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from flashwire_service.errors import Refusal
from flashwire_service.front import headers, incoming, problems

LINGER_BYTES = 8 * 2**20
LINGER_S = 5.0
READ_WINDOW_S = 10.0  # for so long a client may be silent, or slower than the minimum rate
LOOPBACK_BYTES = 256 * 2**10  # of the receive buffer of a connection from this machine
ENDING_AT_ONCE = 64  # connections beyond the limit that are being refused or closed
_MAX_DIGITS = 19  # of a 64-bit length
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")  # RFC 3986, section 3.2.2, with a port
_BODY_HEADERS = (b"content-length", b"transfer-encoding")


class Protocol(HttpToolsProtocol):
    """One connection.

    max_header_bytes    of a request's line and headers together
    min_download_rate   bytes per second at which what is sent must be taken; 0: any
    max_connections     of all, but for those that are being refused
    on_refused          is told of what is refused here, and by which request id
    """

    max_header_bytes = 32 * 2**10
    min_download_rate = 16 * 2**10
    max_connections = 1024
    on_refused: Callable[[Refusal, str], None] = staticmethod(lambda refusal, request_id: None)

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0  # of the request whose head is being read
        self._in_head = False
        self._body_complete = True
        self._lingering = False
        self._discarded = 0
        self._incoming: incoming.Incoming | None = None  # of the newest request
        self._passed_over = 0  # bytes of a body to come that nobody wants
        self._patience: asyncio.TimerHandle | None = None  # for the next head to be complete
        self._slow_reader: asyncio.TimerHandle | None = None  # for what was sent to be taken
        self._unused_since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        limit_loopback(transport)
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
        self._start_patience()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        self._stop_watching()
        super().connection_lost(exc)
        if self._incoming is not None:
            self._incoming.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # then what is left must still be taken
            self._stop_watching()

    def on_response_complete(self) -> None:
        self._unused_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.abort()
            return
        if self._passed_over:
            data = self._without_unwanted(data)
            if not data:
                return
        began_in_head = self._in_head
        super().data_received(data)
        if began_in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)  # from the second piece on: a head without an end
            if self._head_bytes > self.max_header_bytes:
                self._refuse(self._headers_too_large())
        if self._patience is None and not self._answering and not self.transport.is_closing():
            self._start_patience()  # uvicorn has just stopped its own clock

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._body_complete = False
        self._start_patience()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers have no use here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_patience()
        app = self.app
        upgrade = self.parser.should_upgrade()
        refusal = self._objection(upgrade)
        if refusal is not None:
            request_id = secrets.token_hex(12)
            self.on_refused(refusal, request_id)
            self.app = _answering(refusal, request_id, self._security)
        scope, length = self.scope, dict(self.headers).get(b"content-length")
        try:
            super().on_headers_complete()
        finally:
            self.app = app
        if refusal is None and length is not None:
            body = incoming.Incoming(self, self.cycle, int(length))
            scope[incoming.KEY] = self._incoming = body  # type: ignore[literal-required]
        if upgrade:  # ignored; but the parser takes what follows for another protocol
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self._lingering:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_complete = not self.parser.should_upgrade()
        super().on_message_complete()

    def body_came(self) -> None:
        """All of a body has been read past the parser, which would still wait for it."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.on_message_complete()

    def pass_over(self, nbytes: int) -> None:
        """So many bytes of the body are still to come, and nobody wants them."""
        self._passed_over = nbytes

    def _without_unwanted(self, data: bytes) -> bytes:
        unwanted = min(len(data), self._passed_over)
        self._passed_over -= unwanted
        if not self._passed_over:
            self.body_came()
        return data[unwanted:]

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal("malformed", "the bytes received are not an HTTP/1.1 request"))

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a client may offer what it likes."""

    @property
    def _security(self) -> dict[str, str]:
        return headers.of_reply(secure=self.scheme == "https")

    @property
    def expects_more(self) -> bool:
        """Whether the client may still be sending: a body, or what was no request."""
        return not self._body_complete

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _idle(self) -> bool:
        return not (self._answering or self._in_head or self.transport.is_closing())

    def _make_room(self) -> None:
        """This connection is one too many."""
        if len(self.connections) > self.max_connections + ENDING_AT_ONCE:
            self.transport.abort()
            return
        others = [c for c in self.connections if isinstance(c, Protocol) and c is not self]
        if sum(not c.transport.is_closing() for c in others) < self.max_connections:
            return
        idle = [c for c in others if c._idle]
        if idle:
            min(idle, key=lambda c: c._unused_since).transport.close()
        else:
            said = f"all {self.max_connections} connections that this server keeps are in use"
            self._refuse(Refusal("too_many_connections", said))

    def watch_reader(self) -> None:
        """Cut the connection off unless what was sent is taken in time."""
        if self._slow_reader is None and self.min_download_rate:
            taking_s = self.transport.get_write_buffer_size() / self.min_download_rate
            self._slow_reader = self.loop.call_later(READ_WINDOW_S + taking_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._slow_reader is not None:
            self._slow_reader.cancel()
            self._slow_reader = None

    def _start_patience(self) -> None:
        self._end_patience()
        self._patience = self.loop.call_later(self.timeout_keep_alive, self._lose_patience)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        """No complete head came in time."""
        self._patience = None
        if self.transport.is_closing():
            return
        if self._answering:  # meanwhile what follows may be left unread
            self._start_patience()
        elif self._in_head:
            limit = f"{self.timeout_keep_alive:g} s"
            said = f"the head of a request was not complete {limit} after its first byte"
            self._refuse(Refusal("request_timeout", said))
        else:
            self.transport.close()

    def linger(self, transport: asyncio.Transport) -> None:
        """Say that no more will be sent, and let the client read before the end."""
        self._lingering = True
        self.flow.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(LINGER_S, transport.close)

    def _objection(self, upgrade: bool) -> Refusal | None:
        """Why a head that the parser accepts is not accepted here."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            return self._headers_too_large()
        hosts = [value for name, value in self.headers if name == b"host"]
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return Refusal("malformed", "only HTTP/1.1 and HTTP/1.0 are spoken here")
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            return Refusal("malformed", "a request has one Host header")
        if any(not _HOST.fullmatch(host) for host in hosts):
            return Refusal("malformed", "Host is not the name of one")
        for name, value in self.headers:
            if name == b"content-length" and len(value) > _MAX_DIGITS:
                return Refusal("malformed", "Content-Length has too many digits")
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                said = "no transfer encoding but chunked is spoken here"
                return Refusal("unsupported_media_type", said)
            if upgrade and name in _BODY_HEADERS:
                return Refusal("malformed", "send this without an Upgrade header")
        return None

    def _headers_too_large(self) -> Refusal:
        limit = self.max_header_bytes
        return Refusal("headers_too_large", f"the head of a request may have {limit} bytes")

    def _refuse(self, refusal: Refusal) -> None:
        """Answer outside of any application, and end the connection.

        What came is the body of the newest request, or no request. In the first case that request
        is given up; in the second, one that is being answered comes first and is the last.
        """
        self._body_complete = False
        cycle = self.cycle
        if self._answering:
            in_body = cycle.more_body and not self.pipeline and not cycle.response_started
            if not in_body:
                cycle.keep_alive = False
                self.pipeline.clear()
                self.flow.pause_reading()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        request_id = secrets.token_hex(12)
        self.on_refused(refusal, request_id)
        self.transport.write(_whole_reply(refusal, request_id, self._security))
        self.transport.close()


class _Lingering:
    """A transport whose `close` waits for a client that is still sending. Otherwise as it was."""

    def __init__(self, transport: asyncio.Transport, protocol: Protocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._closing = False

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._transport.get_write_buffer_size():
            self._protocol.watch_reader()
        if self._protocol.expects_more and not self._transport.is_closing():
            self._protocol.linger(self._transport)
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def limit_loopback(transport: asyncio.Transport) -> None:
    """Left to itself, the kernel buffers megabytes of every body from this machine, which spares no
    round trips here, and where many come at once stalls this process for milliseconds.
    """
    peer = transport.get_extra_info("peername")
    if isinstance(peer, tuple) and ip_address(peer[0].partition("%")[0]).is_loopback:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BYTES)


def _whole_reply(refusal: Refusal, request_id: str, security: Mapping[str, str]) -> bytes:
    body = problems.encode(refusal, request_id)
    lines = {
        "content-type": problems.MEDIA_TYPE,
        "content-length": len(body),
        "x-request-id": request_id,
        "connection": "close",
        **problems.retry_after(refusal),
        **security,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    return STATUS_LINE[refusal.row.status] + head.encode("ascii") + body


def _answering(refusal: Refusal, request_id: str, security: Mapping[str, str]) -> Any:
    """An application that gives one answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = problems.response(refusal, request_id)
        response.headers["x-request-id"] = request_id
        response.headers["connection"] = "close"
        response.headers.update(security)
        await response(scope, receive, send)

    return app

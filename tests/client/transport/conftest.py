"""A server that does, byte by byte, as it is told; and callers by httpx's transport and by ours."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from flashwire.transport import Content, Transport
from flashwire.transport.aio import AsyncTransport

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
TIMEOUT_S = 5.0
_TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default takes long to load
KINDS = ("stock-sync", "stock-async", "ours-sync", "ours-async")


class Peer:
    """The server's end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(TIMEOUT_S)
        self._received = b""

    def head(self) -> bytes:
        """The head of the next request; b"" when there is none."""
        while b"\r\n\r\n" not in self._received:
            piece = self.sock.recv(65536)
            if not piece:
                return b""
            self._received += piece
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        return head.lower()

    def body(self, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" in head:
            return self._chunks()
        _, _, length = head.partition(b"content-length: ")
        return self._exactly(int(length.split(b"\r\n")[0] or 0))

    def request(self) -> bytes:
        """Read a request and return its body."""
        head = self.head()
        if not head:
            raise EOFError
        return self.body(head)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reset(self) -> None:
        """End the connection as if this process had crashed."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def ended(self) -> bool:
        """Wait for the client to close."""
        with contextlib.suppress(ConnectionError):
            return self.sock.recv(1) == b""
        return True

    def _chunks(self) -> bytes:
        whole = []
        while True:
            while b"\r\n" not in self._received:
                self._received += self.sock.recv(65536)
            size, _, self._received = self._received.partition(b"\r\n")
            piece = self._exactly(int(size, 16) + 2)
            if len(piece) == 2:
                return b"".join(whole)
            whole.append(piece[:-2])

    def _exactly(self, nbytes: int) -> bytes:
        pieces, left = [self._received[:nbytes]], nbytes - len(self._received)
        self._received = self._received[nbytes:]
        while left > 0:
            pieces.append(piece := self.sock.recv(min(left, 2**20)))
            if not piece:
                raise EOFError
            left -= len(piece)
        return b"".join(pieces)


Behaviour = Callable[[Peer], object]


def answering(reply: bytes = OK, times: int = 1000) -> Behaviour:
    """Reply so many times, always the same, then close."""

    def behave(peer: Peer) -> None:
        for _ in range(times):
            peer.request()
            peer.send(reply)

    return behave


def echoing(peer: Peer) -> None:
    """Reply with what was sent."""
    while True:
        body = peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


class Scripted:
    """`script` has what to do with the next connections, one after the other."""

    answering = staticmethod(answering)
    echoing = staticmethod(echoing)

    def __init__(self, path: Path | None = None, context: ssl.SSLContext | None = None) -> None:
        self.script: list[Behaviour] = []
        self.accepted = 0
        self.results: queue.Queue[object] = queue.Queue()
        self._context = context
        family = socket.AF_UNIX if path else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.bind(str(path) if path else ("127.0.0.1", 0))
        self._listener.listen()
        self.uds = str(path) if path else None
        host = "localhost" if path else f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"http{'s' if context else ''}://{host}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def result(self) -> Any:
        """What the next behaviour to end returned."""
        return self.results.get(timeout=TIMEOUT_S)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            behaviour = self.script.pop(0) if self.script else answering()
            self._threads.append(threading.Thread(target=self._behave, args=(sock, behaviour)))
            self._threads[-1].start()

    def _behave(self, sock: socket.socket, behaviour: Behaviour) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            if self._context is None:
                self.results.put(behaviour(Peer(sock)))
                return
            with self._context.wrap_socket(sock, server_side=True) as secured:
                self.results.put(behaviour(Peer(secured)))


@dataclass
class Got:
    status: int
    body: bytes
    headers: httpx.Headers
    extensions: dict[str, Any]


class Caller:
    """httpx over one of the transports, sync or async, called alike. Only its timeouts are short.

    http   the httpx client
    """

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        ours, self.asynchronous = kind.startswith("ours"), kind.endswith("-async")
        transport: Any
        http: Any = httpx.Client
        if self.asynchronous:
            transport = AsyncTransport if ours else httpx.AsyncHTTPTransport
            http = httpx.AsyncClient
        else:
            transport = Transport if ours else httpx.HTTPTransport
        options.setdefault("verify", _TRUSTS_NOBODY)
        self.http = http(base_url=url, timeout=TIMEOUT_S, transport=transport(**options))
        self._runner = asyncio.Runner()

    def send(self, method: str = "GET", path: str = "/", **options: Any) -> Got:
        return self.run(self._send(method, path, **options))

    def run(self, work: Any) -> Any:
        """A coroutine to its end. Those of a blocking caller wait for nothing."""
        if self.asynchronous:
            return self._runner.run(work)
        try:
            work.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("a blocking transport awaits nothing")

    async def _send(self, method: str, path: str, **options: Any) -> Got:
        reply = await self.opened(method, path, **options)
        body = (await reply.aread()) if self.asynchronous else reply.read()
        return Got(reply.status_code, body, reply.headers, reply.extensions)

    async def opened(self, method: str = "GET", path: str = "/", **options: Any) -> httpx.Response:
        """A reply whose body has not been read."""
        content = options.get("content")
        if self.asynchronous and content is not None and not isinstance(content, bytes):
            options["content"] = _awaited(content)
        request = self.http.build_request(method, path, **options)
        if isinstance(content, Content):
            request.stream = content  # as flashwire's client does
        reply = self.http.send(request, stream=True)
        found: httpx.Response = await reply if self.asynchronous else reply
        return found

    async def finish(self, reply: httpx.Response) -> None:
        if self.asynchronous:
            await reply.aclose()
        else:
            reply.close()

    def close(self) -> None:
        if self.asynchronous:
            self._runner.run(self.http.aclose())
        else:
            self.http.close()
        self._runner.close()


async def _awaited(content: Any) -> AsyncIterator[Any]:
    for piece in content:
        yield piece


@pytest.fixture
def make_server() -> Iterator[Callable[..., Scripted]]:
    """make_server(path=None, context=None): on loopback or a unix socket, with TLS or without."""
    made: list[Scripted] = []

    def make(**options: Any) -> Scripted:
        made.append(started := Scripted(**options))
        return started

    yield make
    for started in made:
        started.close()


@pytest.fixture
def server(make_server: Callable[..., Scripted]) -> Scripted:
    return make_server()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def call(kind: str, make_server: object) -> Iterator[Callable[..., Caller]]:
    """call(server, limits=...): a caller of this kind. It is closed before any server, which would
    wait for it.
    """
    made: list[Caller] = []

    def make(server: Scripted, **options: Any) -> Caller:
        made.append(caller := Caller(kind, server.url, uds=server.uds, **options))
        return caller

    yield make
    for caller in made:
        caller.close()


@pytest.fixture
def caller(call: Callable[..., Caller], server: Scripted) -> Caller:
    return call(server)

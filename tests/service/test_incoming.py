"""Bodies that go from the socket straight into shared memory, over real sockets, on every loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import uvicorn
import uvloop

from flashwire import wire
from flashwire_service.front import server
from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Work
from flashwire_service.ipc.frames import Reply, State
from flashwire_service.ipc.memory import Memory
from flashwire_service.logs import Log
from flashwire_service.meter import IN_FLIGHT
from flashwire_service.settings import Settings
from flashwire_service.tls import Certificate

HEALTHY = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = 3 * 2**20


class Pool:
    """Keeps what it is asked, and answers with as many bytes of the body as asked by scale."""

    ready, draining, state = True, False, State()

    def __init__(self) -> None:
        self.facts: dict[int, dict[str, object]] = {0: {}}
        self.bodies: list[bytes] = []
        self.inodes: list[int] = []
        self.holding = asyncio.Event()
        self.holding.set()

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        assert isinstance(work.body, Memory)
        self.inodes.append(_inode(work.body))
        await self.holding.wait()
        self.bodies.append(bytes(work.body.view[: work.size]))
        reply = Memory.create(work.size)
        reply.view[:] = self.bodies[-1]
        return Answer(Reply(id=1, size=work.size), reply, 0)


def _inode(memory: Memory) -> int:
    return os.fstat(memory.fd).st_ino


class Served:
    def __init__(self, loop: str, certificate: Any, **settings: Any) -> None:
        self.pool = Pool()
        self.settings = Settings(**settings)
        self.app = create_app(self.settings, self.pool, Log("front", "error"))
        self.buffers = self.app.state.front.buffers
        chain = certificate and Certificate(str(certificate.cert), str(certificate.key))
        self._server = uvicorn.Server(server.config_of(self.app, self.settings, chain))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._tls = certificate
        factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
        self._thread = threading.Thread(target=self._run, args=(factory,))
        self._thread.start()
        self._open: list[socket.socket] = []

    def _run(self, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            self.loop = runner.get_loop()
            runner.run(self._server._serve([self._listener]))

    def connect(self) -> socket.socket:
        made = socket.create_connection(self._listener.getsockname(), timeout=20)
        if self._tls:
            context = ssl.create_default_context(cafile=str(self._tls.cert))
            made = context.wrap_socket(made, server_hostname="127.0.0.1")
        self._open.append(made)
        return made

    def close(self) -> None:
        for sock in self._open:
            sock.close()
        self._server.should_exit = True
        self._server.config.timeout_graceful_shutdown = 1
        self._thread.join()
        self._listener.close()


@pytest.fixture(params=["uvloop", "asyncio", "tls"])
def serve(request: Any, make_certificate: Any) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(**settings: Any) -> Served:
        certificate = make_certificate("front") if request.param == "tls" else None
        made.append(Served(request.param, certificate, **settings))
        return made[-1]

    yield start
    for served in made:
        served.close()


def message(seed: int, length: int = LARGE, **options: Any) -> bytes:
    """A message with q, k, v of about `length` bytes in all."""
    rows = length // (3 * 4 * 64)
    rng = np.random.default_rng(seed)
    tensors = {n: rng.standard_normal((rows, 64), np.float32) for n in ("q", "k", "v")}
    headers = {n: wire.Header("float32", t.shape) for n, t in tensors.items()}
    layout = wire.lay_out(options, headers)
    return b"".join(layout.buffers({n: t.data.cast("B") for n, t in tensors.items()}))


def post(body: bytes, *lines: str, path: str = "/attention") -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-type: {wire.MEDIA_TYPE}",
            f"content-length: {len(body)}", *lines, "", ""]  # fmt: skip
    return "\r\n".join(head).encode() + body


def reply(sock: socket.socket) -> tuple[int, bytes, bytes]:
    """Status, head and body of the next reply."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        assert byte, "the connection has ended"
        head += byte
    size = re.search(rb"\r\ncontent-length: (\d+)", head)
    body = bytearray()
    while size and len(body) < int(size[1]):
        body += sock.recv(int(size[1]) - len(body))
    return int(head.split()[1]), head, bytes(body)


def until(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise TimeoutError


def test_it_arrives_as_it_was_sent_and_its_memory_is_used_again(serve: Any) -> None:
    served = serve()
    sock = served.connect()
    for seed in range(4):
        sent = message(seed, LARGE - seed * 100_000)
        sock.sendall(post(sent))
        status, head, body = reply(sock)
        assert (status, body) == (200, sent)
        assert b"connection: close" not in head
    assert len(set(served.pool.inodes)) == 1
    assert served.buffers.kept_bytes >= LARGE - 1000


@pytest.mark.parametrize("step", [1, 1000, 100_000])
def test_in_pieces(serve: Any, step: int) -> None:
    served = serve()
    sock = served.connect()
    sent = message(1, 200_000)
    whole = post(sent)
    start = len(whole) - 5000 if step == 1 else 0
    sock.sendall(whole[:start])
    for at in range(start, len(whole), step):
        sock.sendall(whole[at : at + step])
    assert reply(sock)[2] == sent


def test_what_follows_is_the_next_request(serve: Any) -> None:
    served = serve()
    sock = served.connect()
    first, second = message(1, 400_000), message(2, 300_000)
    sock.sendall(post(first) + HEALTHY + post(second) + HEALTHY)
    assert reply(sock)[2] == first
    assert reply(sock)[0] == 200
    assert reply(sock)[2] == second
    assert reply(sock)[0] == 200


def test_a_client_that_waits_is_told_to_go_on(serve: Any) -> None:
    served = serve()
    sock = served.connect()
    sent = message(3)
    whole = post(sent, "expect: 100-continue")
    head_bytes = len(whole) - len(sent)
    sock.sendall(whole[:head_bytes])
    assert reply(sock)[0] == 100
    sock.sendall(sent)
    assert reply(sock)[2] == sent


def test_lists_of_offsets_follow_the_message(serve: Any) -> None:
    served = serve()
    sock = served.connect()
    rows = 2048
    offsets = list(range(rows + 1))
    tensors = np.ones((rows, 1, 64), np.float32)
    headers = {n: wire.Header("float32", tensors.shape) for n in ("q", "k", "v")}
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    layout = wire.lay_out(options, headers)
    sent = b"".join(layout.buffers({n: tensors.data.cast("B") for n in headers}))
    sock.sendall(post(sent))
    status, _, body = reply(sock)
    assert status == 200, body
    seen = served.pool.bodies[0]
    assert seen.startswith(sent)
    placed = np.frombuffer(seen, "<i8", rows + 1, offset=len(sent) + -len(sent) % wire.ALIGNMENT)
    assert placed.tolist() == offsets


def test_a_client_that_leaves_midway_leaves_nothing(serve: Any) -> None:
    served = serve()
    sent = message(4)
    for _ in range(3):
        sock = served.connect()
        sock.sendall(post(sent)[: len(sent) // 2])
        until(lambda: served.app.state.front.uploads.held_bytes)
        sock.close()
        until(lambda: not served.app.state.front.uploads.held_bytes)
    assert served.pool.bodies == []
    sock = served.connect()
    sock.sendall(post(message(5)))
    assert reply(sock)[2] == message(5)
    assert len(set(served.pool.inodes)) == 1
    until(lambda: served.buffers.kept_bytes == -(-len(sent) // 4096) * 4096)


def test_a_refusal_midway_ends_the_connection_and_not_the_server(serve: Any) -> None:
    served = serve()
    sent = bytearray(message(6))
    at = sent.index(b"float32", 100_000)  # k's header, behind the payload of q
    sent[at : at + 7] = b"float99"
    sock = served.connect()
    with contextlib.suppress(OSError):
        sock.sendall(post(bytes(sent)))
    status, head, body = reply(sock)
    assert status in (400, 422)
    assert b"connection: close" in head
    assert "dtype" in json.loads(body)["detail"]
    again = served.connect()
    again.sendall(post(message(7)))
    assert reply(again)[2] == message(7)


@pytest.mark.parametrize("spoiled", [b"\x83", b"float32"], ids=["at once", "later"])
def test_a_small_rest_is_passed_over_and_the_connection_kept(serve: Any, spoiled: bytes) -> None:
    served = serve()
    sock = served.connect()
    sent = bytearray(message(8, 60_000))  # little enough to be skipped
    at = sent.index(spoiled, 0 if spoiled == b"\x83" else 10_000)
    sent[at : at + len(spoiled)] = b"\xc1" * len(spoiled)
    whole = post(bytes(sent))
    sock.sendall(whole[:10_000])
    until(lambda: spoiled == b"\x83" or served.app.state.front.uploads.turns._senders)
    time.sleep(0.05)  # the body is being received past the parser by now
    sock.sendall(whole[10_000:-20_000])
    assert reply(sock)[0] == 400
    sock.sendall(whole[-20_000:] + HEALTHY)
    assert reply(sock)[0] == 200


def test_memory_that_a_worker_may_still_read_is_not_used_again(serve: Any) -> None:
    served = serve()
    served.pool.holding.clear()
    sock = served.connect()
    sock.sendall(post(message(9)))
    until(lambda: served.pool.inodes)
    sock.close()  # while it is being computed
    until(lambda: not served.app.state.front.metrics.meter.value(IN_FLIGHT))
    served.loop.call_soon_threadsafe(served.pool.holding.set)
    other = served.connect()
    other.sendall(post(message(10)))
    assert reply(other)[2] == message(10)
    assert len(set(served.pool.inodes)) == 2


def test_nothing_is_kept_where_nothing_may_be(serve: Any) -> None:
    served = serve(reuse_bytes=0)
    sock = served.connect()
    for seed in (1, 2):
        sock.sendall(post(message(seed)))
        assert reply(sock)[2] == message(seed)
    assert served.buffers.kept_bytes == 0

"""The protocol over a real socket: garbage, limits, early replies, reuse of connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
import uvicorn

from flashwire_service.front import http, server
from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Work
from flashwire_service.ipc.frames import Reply, State
from flashwire_service.logs import Log
from flashwire_service.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Settings(max_body_bytes=256 * 1024, max_header_bytes=4096, keep_alive_s=0.4)
BODY = json.dumps({"q": [[1]], "k": [[1]], "v": [[1]]}).encode()
GOOD = (
    b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
) + BODY


class SlowPool:
    """Answers `{}` after `delay` seconds."""

    def __init__(self) -> None:
        self.ready = True
        self.draining = False
        self.facts: dict[int, dict[str, object]] = {0: {}}
        self.state = State()
        self.delay = 0.0
        self.cancelled = 0

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Answer(Reply(id=1, size=2, body=b"{}"), None, 0)


@dataclass
class Served:
    """A running front end, and its pool."""

    port: int
    pool: SlowPool
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        self.writers.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Served]:
    pool = SlowPool()
    app = create_app(LIMITS, pool, Log("front", "error"))
    running = uvicorn.Server(server.config_of(app, LIMITS))
    # As the front end gets it: a number, from which Python learns that it is TCP (no delays then).
    sock = socket.socket(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    task = asyncio.create_task(running._serve([sock]))
    yield Served(sock.getsockname()[1], pool)
    running.should_exit = True
    running.config.timeout_graceful_shutdown = 1
    await task


@pytest_asyncio.fixture(loop_scope="module")
async def served(front: Served) -> AsyncIterator[Served]:
    front.pool.delay, front.pool.cancelled = 0.0, 0
    yield front
    await front.close()


@dataclass
class Got:
    status: int
    headers: dict[str, str]
    body: bytes

    def problem(self, status: int, code: str) -> None:
        assert self.status == status
        assert self.headers["content-type"] == "application/problem+json"
        document = json.loads(self.body)
        assert document["code"] == code
        assert document["request_id"] == self.headers["x-request-id"]


async def read_reply(reader: asyncio.StreamReader) -> Got:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    first, *lines = head.decode().rstrip().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Got(int(first.split()[1]), headers, body)


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends the connection, without a reset."""
    return await asyncio.wait_for(reader.read(), 5) == b""


async def exchange(served: Served, sent: bytes) -> tuple[Got, asyncio.StreamReader]:
    reader, writer = await served.open()
    writer.write(sent)
    return await read_reply(reader), reader


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\0" * 100_000)
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "sent",
    [b"garbage\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n",
     b"GET /\x00 HTTP/1.1\r\n\r\n", b"POST /attention HTTP/1.1\r\ncontent-length: x\r\n\r\n",
     b"POST /attention HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
     b"POST /attention HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
     b"POST /attention HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
     b"GET /healthz HTTP/1.1\r\ncontent-length: " + b"0" * 3900 + b"\r\n\r\n"],
)  # fmt: skip
async def test_garbage_is_a_problem_too(served: Served, sent: bytes) -> None:
    got, reader = await exchange(served, sent)
    got.problem(400, "malformed")
    assert got.headers["connection"] == "close"
    assert "server" not in got.headers
    assert await closed(reader)
    assert (await exchange(served, GOOD))[0].status == 200


async def test_transfer_encodings_not_spoken(served: Served) -> None:
    for coding in (b"gzip, chunked", b"gzip"):
        head = b"POST /attention HTTP/1.1\r\nhost: x\r\ntransfer-encoding: " + coding
        got, reader = await exchange(served, head + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert got.status in (400, 415)  # the parser itself refuses what does not end in chunked
        got.problem(got.status, {400: "malformed", 415: "unsupported_media_type"}[got.status])
        assert await closed(reader)


async def test_a_head_over_its_limit(served: Served) -> None:
    for size, status in ((3000, 200), (5000, 431), (200_000, 431)):
        head = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-filler: " + b"a" * size + b"\r\n\r\n"
        got, reader = await exchange(served, head)
        assert got.status == status
        if status == 431:
            got.problem(431, "headers_too_large")
            assert got.headers["connection"] == "close"
            assert await closed(reader)


async def test_a_long_path_counts_as_head(served: Served) -> None:
    got, _ = await exchange(served, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    got.problem(431, "headers_too_large")


async def test_a_head_without_an_end_is_cut_off(served: Served) -> None:
    reader, writer = await served.open()
    writer.write(b"GET /healthz HTTP/1.1\r\nx-filler: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            writer.write(b"a" * 2000)
            await asyncio.sleep(0)
    (await read_reply(reader)).problem(431, "headers_too_large")


async def test_a_body_over_the_limit_is_refused_before_it_comes(served: Served) -> None:
    head = b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n"
    got, reader = await exchange(served, head + b"expect: 100-continue\r\n\r\n")
    got.problem(413, "too_large")  # and no 100 before it
    assert await closed(reader)


async def test_a_client_in_full_swing_reads_its_refusal(served: Served) -> None:
    """It sends on while the reply comes, and must not find a reset in its place."""
    reader, writer = await served.open()
    writer.write(b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n")
    for _ in range(40):
        writer.write(b"\0" * 100_000)
        await writer.drain()
    (await read_reply(reader)).problem(413, "too_large")
    assert await closed(reader)


async def test_lingering_has_an_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_BYTES", 200_000)
    monkeypatch.setattr(http, "LINGER_S", 60.0)
    reader, writer = await served.open()
    writer.write(b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-length: 90000000\r\n\r\n")
    await read_reply(reader)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_for_ever(writer), 10)


async def test_chunks_are_counted(served: Served) -> None:
    reader, writer = await served.open()
    writer.write(
        b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-type: application/msgpack\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    payload = b"\x81\xa1q\x83\xa5dtype\xa4bool\xa5shape\x91\xce\x01\x00\x00\x00\xa4data\xc6"
    payload += b"\x01\x00\x00\x00" + b"\0" * 300_000
    for at in range(0, len(payload), 1000):
        piece = payload[at : at + 1000]
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    (await read_reply(reader)).problem(413, "too_large")
    assert await closed(reader)


async def test_100_continue_is_sent_for_a_body_that_will_be_read(served: Served) -> None:
    reader, writer = await served.open()
    head, _, body = GOOD.partition(b"\r\n\r\n")
    writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await read_reply(reader)).status == 200


async def test_a_small_refused_body_leaves_the_connection_usable(served: Served) -> None:
    reader, writer = await served.open()
    bad = GOOD.replace(b"application/json", b"text/whatever")
    for _ in range(3):
        writer.write(bad)
        (await read_reply(reader)).problem(415, "unsupported_media_type")
        writer.write(GOOD)
        assert (await read_reply(reader)).status == 200


async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    served.pool.delay = 0.05
    reader, writer = await served.open()
    writer.write(GOOD + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" + GOOD)
    bodies = [(await read_reply(reader)).body for _ in range(3)]
    assert bodies == [b"{}", b'{"status":"ok"}', b"{}"]


async def test_garbage_behind_a_request_does_not_spoil_its_reply(served: Served) -> None:
    served.pool.delay = 0.1
    reader, writer = await served.open()
    writer.write(GOOD)
    await asyncio.sleep(0.03)
    writer.write(b"garbage\r\n\r\n")
    assert (await read_reply(reader)).body == b"{}"
    assert await closed(reader)


async def test_a_connection_lives_through_requests_longer_than_its_idle_time(
    served: Served,
) -> None:
    served.pool.delay = 0.6  # 1.5 times keep_alive_s
    reader, writer = await served.open()
    writer.write(GOOD + GOOD)
    assert (await read_reply(reader)).status == 200
    assert (await read_reply(reader)).status == 200
    served.pool.delay = 0.0
    for _ in range(3):
        await asyncio.sleep(0.3)
        writer.write(GOOD)
        assert (await read_reply(reader)).status == 200
    assert await closed(reader)  # idle at last


async def test_a_connection_that_never_asks_is_closed(served: Served) -> None:
    for sent in (b"", b"\r\n"):
        reader, writer = await served.open()
        writer.write(sent)
        started = time.monotonic()
        assert await closed(reader)
        assert time.monotonic() - started > 0.3


async def test_half_a_head_is_a_problem_in_time(served: Served) -> None:
    for before in (b"", GOOD):
        reader, writer = await served.open()
        if before:
            writer.write(before)
            assert (await read_reply(reader)).status == 200
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
        (await read_reply(reader)).problem(408, "request_timeout")
        assert await closed(reader)


@pytest.mark.parametrize("drop", [b"\r\n", b"GET /healthz HTTP/1.1\r\nx: "])
async def test_a_drop_now_and_then_does_not_keep_a_connection(served: Served, drop: bytes) -> None:
    reader, writer = await served.open()
    writer.write(GOOD)
    await read_reply(reader)
    started = time.monotonic()
    writer.write(drop)

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(0.1)
                writer.write(b"\r\n" if drop == b"\r\n" else b"a")

    dripping = asyncio.create_task(drip())
    await asyncio.wait_for(reader.read(), 5)
    assert time.monotonic() - started > 0.3
    dripping.cancel()


async def test_a_head_behind_a_long_request_has_its_time(served: Served) -> None:
    """It is not read to its end while two requests before it are being answered."""
    served.pool.delay = 0.6  # 1.5 times keep_alive_s
    reader, writer = await served.open()
    last = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    writer.write(GOOD)
    await asyncio.sleep(0.05)  # it is being answered, and what comes with the next is not read on
    writer.write(GOOD + last[:10])
    await asyncio.sleep(0.05)
    writer.write(last[10:])
    bodies = [(await read_reply(reader)).body for _ in range(3)]
    assert bodies == [b"{}", b"{}", b'{"status":"ok"}']


async def test_the_rest_of_a_refused_body_that_never_comes_is_not_waited_for(
    served: Served,
) -> None:
    reader, writer = await served.open()
    bad = GOOD.replace(b"application/json", b"text/whatever")
    writer.write(bad[:-5])
    (await read_reply(reader)).problem(415, "unsupported_media_type")
    writer.write(bad[-5:-3])
    assert await closed(reader)


async def test_a_caller_who_leaves_cancels_the_work(served: Served) -> None:
    served.pool.delay = 30.0
    _, writer = await served.open()
    writer.write(GOOD)
    await asyncio.sleep(0.1)
    writer.transport.abort()
    for _ in range(100):
        if served.pool.cancelled:
            break
        await asyncio.sleep(0.02)
    assert served.pool.cancelled == 1


async def test_trailers_are_not_kept(served: Served) -> None:
    reader, writer = await served.open()
    head = b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    chunk = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    writer.write(head + chunk + b"x-request-id: from-a-trailer\r\n\r\n")
    got = await read_reply(reader)
    assert got.status == 200
    assert got.headers["x-request-id"] != "from-a-trailer"


async def test_an_offered_upgrade_is_not_taken(served: Served) -> None:
    offer = b"connection: upgrade\r\nupgrade: h2c\r\n"
    got, reader = await exchange(served, b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n")
    assert (got.status, got.headers["connection"]) == (200, "close")
    assert await closed(reader)
    with_body = GOOD.replace(b"host: x\r\n", b"host: x\r\n" + offer)
    got, reader = await exchange(served, with_body)
    got.problem(400, "malformed")
    assert await closed(reader)


class Accepted:
    """What a transport says of its socket."""

    def __init__(self, sock, peer):
        self._said = {"socket": sock, "peername": peer}

    def get_extra_info(self, name):
        return self._said[name]


@pytest.mark.parametrize(
    ("peer", "limited"),
    [(("127.0.0.1", 5), True), (("::1", 5, 0, 0), True), (("192.0.2.7", 5), False),
     (("fe80::1%eth0", 5, 0, 2), False), ("", False), (None, False)],
)  # fmt: skip
async def test_the_kernel_buffers_little_of_what_comes_from_this_machine(peer, limited):
    with socket.socket() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        http.limit_loopback(Accepted(sock, peer))
        now = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert now == (2 * http.LOOPBACK_BYTES if limited else before)  # Linux counts its own part, too

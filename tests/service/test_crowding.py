"""Over real sockets: callers who are slow, callers who do not read, and too many of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from uvicorn.server import ServerState

from flashwire import wire
from flashwire_service.front import body, http, server, uploads
from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Work
from flashwire_service.ipc.frames import Reply, State
from flashwire_service.ipc.memory import Memory
from flashwire_service.logs import Log
from flashwire_service.settings import Settings

LARGE = 32 * 2**20
# A message whose q has 2**20 float32 elements, up to its payload.
HEAD = b"\x81\xa1q\x83\xa5dtype\xa7float32\xa5shape\x91\xce\x00\x10\x00\x00"
HEAD += b"\xa4data\xc6\x00\x40\x00\x00"
HEALTHY = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
SMALL = json.dumps({"q": [[1]], "k": [[1]], "v": [[1]]}).encode()


class Pool:
    """Answers after `delay` seconds with `size` bytes of memory of its own."""

    ready, draining, state = True, False, State()

    def __init__(self, size: int = 2, delay: float = 0.0) -> None:
        self.facts: dict[int, dict[str, object]] = {0: {}}
        self.size, self.delay = size, delay
        self.memories: list[Memory] = []

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        await asyncio.sleep(self.delay)
        memory = Memory.create(self.size)
        self.memories.append(memory)
        return Answer(Reply(id=1, size=self.size), memory, 0)


class Front:
    """A front end that serves, and connections to it."""

    def __init__(self, port: int, pool: Pool) -> None:
        self.port = port
        self.pool = pool
        self.writers: list[asyncio.StreamWriter] = []

    async def open(
        self, *sent: bytes, sock: socket.socket | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if sock is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        else:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            reader, writer = await asyncio.open_connection(sock=sock)
        self.writers.append(writer)
        writer.writelines(sent)
        return reader, writer


@contextlib.asynccontextmanager
async def front(pool: Pool, **settings: int) -> AsyncIterator[Front]:
    chosen = Settings(**settings)  # type: ignore[arg-type]
    app = create_app(chosen, pool, Log("front", "error"))
    running = uvicorn.Server(server.config_of(app, chosen))
    sock = socket.socket(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    serving = asyncio.create_task(running._serve([sock]))
    front = Front(sock.getsockname()[1], pool)
    try:
        yield front
    finally:
        for writer in front.writers:
            writer.transport.abort()
        running.should_exit = True
        running.config.timeout_graceful_shutdown = 1
        await serving


def post(data: bytes, length: int, media_type: str = wire.MEDIA_TYPE) -> bytes:
    head = f"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-type: {media_type}\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode() + data


def good() -> bytes:
    return post(SMALL, len(SMALL), "application/json")


async def status(reader: asyncio.StreamReader) -> int:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return int(head.split()[1])


async def ends(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends the connection, by whatever means."""
    with contextlib.suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(2**16), 10):
            pass
    return True


async def until(condition: object) -> None:
    for _ in range(500):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


async def test_a_fast_start_does_not_buy_a_slow_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 0.3)
    async with front(Pool(), min_upload_rate=2**16) as served:
        start = HEAD + bytes(3 * 2**20)  # worth 48 seconds, were it an average
        reader, writer = await served.open(post(start, len(HEAD) + 2**22))

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    await asyncio.sleep(0.05)
                    writer.write(bytes(100))

        dripping = asyncio.create_task(drip())
        assert await status(reader) == 408
        dripping.cancel()


async def test_an_upload_at_the_minimum_rate_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 0.5)
    async with front(Pool(), min_upload_rate=50) as served:
        padded = SMALL + bytes(200).replace(b"\0", b" ")
        reader, writer = await served.open(post(b"", len(padded), "application/json"))
        for at in range(0, len(padded), 20):  # for longer than the window
            writer.write(padded[at : at + 20])
            await asyncio.sleep(0.07)
        assert await status(reader) == 200


async def test_uploads_share_one_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds none is not read on, then refused; what has ended makes room."""
    monkeypatch.setattr(uploads, "PATIENCE_S", 0.3)
    async with front(Pool(), upload_bytes=2**20, max_body_bytes=2**20) as served:
        part = HEAD.replace(b"\x00\x10\x00\x00", b"\x00\x03\x00\x00")
        part = part.replace(b"\xc6\x00\x40", b"\xc6\x00\x0c") + bytes(700_000)
        whole = len(part) + 86_432
        _, first = await served.open(post(part, whole))
        await asyncio.sleep(0.1)
        second, _ = await served.open(post(part, whole))
        assert await status(second) == 429
        reader, _ = await served.open(good())  # a small one has room
        assert await status(reader) == 200
        first.transport.abort()
        await asyncio.sleep(0.1)
        third, writer = await served.open(post(part, whole))
        await asyncio.sleep(0.1)
        writer.write(bytes(86_432))
        assert await status(third) == 422  # read to its end: it lacks k and v


def narrow() -> socket.socket:
    """A socket that the system keeps little for."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    sock.setblocking(False)
    return sock


async def test_a_reply_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_WINDOW_S", 0.2)
    async with front(Pool(size=LARGE), min_download_rate=2**22) as served:
        reader, writer = await served.open(good(), sock=narrow())
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: served.pool.memories and served.pool.memories[0].size < 0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await ends(reader)


async def test_a_reply_that_is_read_slowly_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_WINDOW_S", 0.3)
    size = 2**24
    async with front(Pool(size=size), min_download_rate=2**20) as served:
        reader, _ = await served.open(good(), sock=narrow())
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < size:
            received += len(await asyncio.wait_for(reader.read(2**18), 10))
            await asyncio.sleep(0.01)
        assert received == size


class Stuck(asyncio.Transport):
    """A transport from which nobody takes the last few bytes: they never leave it."""

    closed = aborted = False

    def get_write_buffer_size(self) -> int:
        return 100

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("rate", "cut_off"), [(1000, True), (0, False)])
async def test_a_small_reply_that_nobody_reads_does_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch, rate: int, cut_off: bool
) -> None:
    monkeypatch.setattr(http, "READ_WINDOW_S", 0.1)
    chosen = Settings(min_download_rate=rate)
    config = server.config_of(create_app(chosen, Pool(), Log("front", "error")), chosen)
    config.load()
    protocol, transport = http.Protocol(config, ServerState(), {}), Stuck()
    protocol.connection_made(transport)
    protocol.transport.close()
    protocol.resume_writing()  # that much has left; what is in the transport has not
    assert transport.closed
    assert not transport.aborted
    await asyncio.sleep(0.3)  # more than 0.1 + 100 / 1000
    assert transport.aborted is cut_off
    protocol.connection_lost(None)


async def test_the_longest_idle_gives_way_to_a_new_connection() -> None:
    async with front(Pool(), max_connections=3) as served:
        readers = []
        for _ in range(3):
            reader, _ = await served.open(HEALTHY)
            assert await status(reader) == 200
            readers.append(reader)
        served.writers[0].write(HEALTHY)  # used again: the second is now idle for longest
        assert await status(readers[0]) == 200
        newest, _ = await served.open(HEALTHY)
        assert await status(newest) == 200
        assert await ends(readers[1])
        for number in (0, 2):
            served.writers[number].write(HEALTHY)
            assert await status(readers[number]) == 200


async def test_one_too_many_is_refused_where_all_are_in_use() -> None:
    async with front(Pool(delay=0.5), max_connections=2) as served:
        busy = [(await served.open(good()))[0] for _ in range(2)]
        await asyncio.sleep(0.1)
        reader, _ = await served.open(HEALTHY)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b" 503 " in head
        assert b"retry-after: 2\r\n" in head
        assert b"connection: close\r\n" in head
        assert json.loads(await reader.read())["code"] == "too_many_connections"
        assert [await status(other) for other in busy] == [200, 200]
        reader, _ = await served.open(HEALTHY)
        assert await status(reader) == 200


async def test_a_flood_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ENDING_AT_ONCE", 3)
    async with front(Pool(delay=0.5), max_connections=1) as served:
        busy, _ = await served.open(good())
        await asyncio.sleep(0.1)
        refused = [await served.open() for _ in range(6)]
        heads = []
        for reader, _ in refused:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                heads.append(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5))
        assert len(heads) == 3
        assert await status(busy) == 200

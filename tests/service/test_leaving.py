"""A caller who leaves while a worker computes: the pool hears of it while it still has the body."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack

from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Pool, Work
from flashwire_service.ipc.memory import Memory
from flashwire_service.logs import Log
from flashwire_service.settings import Settings

TENSOR = {"dtype": "float32", "shape": [100, 100], "data": b"\x01\x02\x03\x04" * 10_000}
BODY = msgpack.packb(dict.fromkeys("qkv", TENSOR))
HEADERS = [(b"host", b"x"), (b"content-type", b"application/msgpack")]


class Waiting(Pool):
    """Computes for ever; what it finds in the body when it is told to stop is `found`."""

    def __init__(self) -> None:
        super().__init__(on_drain=lambda _: None, on_orphaned=lambda: None)
        self.started = asyncio.Event()
        self.found = b""

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert isinstance(work.body, Memory)
            self.found = bytes(work.body.view[: work.size])
            raise
        raise AssertionError


async def test_the_body_is_there_until_the_pool_has_given_up() -> None:
    pool = Waiting()
    events = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Any:
        if events:
            return events.pop()
        await pool.started.wait()
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        raise AssertionError(event)

    scope = {
        "type": "http", "method": "POST", "path": "/attention", "raw_path": b"/attention",
        "query_string": b"", "headers": HEADERS, "http_version": "1.1", "scheme": "http",
        "server": ("x", 80), "client": ("x", 1), "root_path": "",
    }  # fmt: skip
    await create_app(Settings(), pool, Log("front", "error"))(scope, receive, send)
    assert pool.found == BODY

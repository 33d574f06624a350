"""The side door of a front end, over an application that answers when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_caller import Caller, sealed

from flashwire.local.frames import SUFFIX
from flashwire.local.transport import SharedTransport
from flashwire_service.errors import Refusal
from flashwire_service.front.door import Door
from flashwire_service.logs import Log
from flashwire_service.meter import Meter
from flashwire_service.settings import Settings

MIB = 2**20
SETTINGS = Settings(
    max_body_bytes=MIB, shared_memory_bytes=3 * MIB, max_connections=4, keep_alive_s=60
)
Starved = Callable[[], contextlib.AbstractContextManager[None]]


class House:
    """A door, and an application that keeps each request until it is `free`, but for /now."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.free = asyncio.Event()
        self.begun = 0
        self.left = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.refused: list[str] = []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path + SUFFIX)
        listener.listen()
        self.door = Door(
            listener, self.app, SETTINGS, Log("front", "error"), Meter(), self.tasks, self.refuse
        )
        self.door.open()

    def refuse(self, refusal: Refusal, request_id: str) -> None:
        self.refused.append(refusal.code)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        while (await receive()).get("more_body"):
            pass
        if scope["path"] != "/now":
            waits = [asyncio.ensure_future(w) for w in (self.free.wait(), receive())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self.left += waits[1].done()
            for wait in waits:
                wait.cancel()
        headers = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(str(tmp_path / "x"))
    yield house
    house.free.set()
    house.door.close()
    for connection in list(house.door.connections):
        connection.close()
    while house.tasks:
        await asyncio.sleep(0.001)
    assert house.door.held_bytes == 0


@pytest.fixture
def call(house: House) -> Any:
    """call("/now", size): a caller that has asked for this, with memory of this size."""
    callers: list[Caller] = []

    def begin(target: str, size: int = 0) -> Caller:
        callers.append(caller := Caller(house.path))
        packet = caller.packet(target.encode(), size=size)
        if size:
            fd = sealed(b"", size=size)
            caller.send(packet, [fd])
            os.close(fd)
        else:
            caller.send(packet)
        return caller

    yield begin
    for caller in callers:
        caller.close()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not met():
            await asyncio.sleep(0.001)


async def answer(caller: Caller) -> tuple[int, str] | None:
    """Status, and the code or what else was answered."""
    got = await asyncio.to_thread(caller.receive)
    if got is None:
        return None
    text = got[1].decode()
    return got[0].status, json.loads(text)["code"] if text.startswith("{") else text


async def test_memory_in_use_is_bounded(house: House, call: Any) -> None:
    kept = [call("/keep", MIB) for _ in range(3)]
    await until(lambda: house.begun == 3)
    assert house.door.held_bytes == 3 * MIB
    refused = call("/now", MIB)
    assert await answer(refused) == (429, "queue_full")
    assert await answer(refused) is None  # it begins anew
    house.free.set()
    assert [await answer(caller) for caller in kept] == [(200, "ok")] * 3
    assert house.refused == ["queue_full"]


async def test_memory_not_in_use_gives_way(house: House, call: Any) -> None:
    """That which was used least recently, and no more of it than must."""
    idle = [call("/now", MIB) for _ in range(3)]
    assert [await answer(caller) for caller in idle] == [(200, "ok")] * 3
    assert await answer(call("/now", MIB)) == (200, "ok")
    assert await answer(idle[0]) is None
    assert house.door.held_bytes == 3 * MIB
    idle[1].send(idle[1].packet(b"/now", size=MIB))
    assert await answer(idle[1]) == (200, "ok")


async def test_memory_is_replaced_by_larger(house: House, call: Any) -> None:
    caller = call("/now", MIB // 2)
    assert await answer(caller) == (200, "ok")
    fd = sealed(b"", size=MIB)
    caller.send(caller.packet(b"/now", size=MIB), [fd])
    os.close(fd)
    assert await answer(caller) == (200, "ok")
    assert house.door.held_bytes == MIB


async def test_memory_larger_than_a_body_may_be_is_refused(house: House, call: Any) -> None:
    assert await answer(call("/now", MIB + 4096)) == (413, "too_large")
    assert house.door.held_bytes == 0


async def test_a_head_over_its_limit_is_refused(house: House) -> None:
    with Caller(house.path) as caller:
        caller.send(caller.packet(b"/now", headers=((b"x", b"y" * 40_000),)))
        assert await answer(caller) == (431, "headers_too_large")


async def test_one_connection_too_many_is_told_so(house: House, call: Any) -> None:
    for _ in range(4):
        call("/keep")
    await until(lambda: house.begun == 4)
    with Caller(house.path) as caller:
        assert await answer(caller) == (503, "too_many_connections")
        assert await answer(caller) is None
    assert len(house.door.connections) == 4


async def test_the_connection_idle_for_longest_gives_way(house: House, call: Any) -> None:
    callers = [call("/now") for _ in range(4)]
    assert [await answer(caller) for caller in callers] == [(200, "ok")] * 4
    assert await answer(call("/now")) == (200, "ok")
    assert await answer(callers[0]) is None


async def test_idle_connections_are_closed_in_time(
    house: House, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, busy = call("/now"), call("/keep")
    assert await answer(idle) == (200, "ok")
    await until(lambda: house.begun == 2)
    house.door.sweep()
    assert len(house.door.connections) == 2
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock() + 61)
    house.door.sweep()
    monkeypatch.undo()
    assert await answer(idle) is None
    house.free.set()
    assert await answer(busy) == (200, "ok")


async def test_whoever_leaves_is_waited_for_no_more(house: House, call: Any) -> None:
    caller = call("/keep", MIB)
    await until(lambda: house.begun == 1)
    caller.close()
    await until(lambda: not house.door.connections and not house.tasks)
    assert house.left == 1
    assert house.door.held_bytes == 0


async def test_at_the_end_requests_are_answered_and_nobody_is_let_in(
    house: House, call: Any
) -> None:
    busy, idle = call("/keep"), call("/now")
    assert await answer(idle) == (200, "ok")
    await until(lambda: house.begun == 2)
    house.door.close()
    assert await answer(idle) is None
    house.free.set()
    assert await answer(busy) == (200, "ok")
    assert await answer(busy) is None
    with pytest.raises(ConnectionRefusedError):
        Caller(house.path)


async def test_without_a_descriptor_it_is_refused(
    house: House, starved: Starved, call: Any
) -> None:
    with Caller(house.path) as caller:
        caller.send(caller.packet(b"/now"))
        assert await answer(caller) == (200, "ok")
        fd = sealed(b"", size=MIB)
        packet = caller.packet(b"/now", size=MIB)
        with starved():
            caller.send(packet, [fd])
            await until(lambda: house.refused == ["queue_full"])
        os.close(fd)
        assert await answer(caller) == (429, "queue_full")


async def test_a_connection_that_was_closed_meanwhile_is_not_used_again(house: House) -> None:
    transport = SharedTransport(house.path, httpx.HTTPTransport())
    with httpx.Client(transport=transport, base_url="http://x") as http:
        body = b"\0" * 100_000
        for _ in range(2):
            reply = await asyncio.to_thread(http.post, "/now", content=body)
            assert reply.text == "ok"
            (connection,) = house.door.connections
            connection.close()

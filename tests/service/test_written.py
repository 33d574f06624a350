"""Memory of replies: lent, returned, used again; fresh for those who keep it."""

from __future__ import annotations

import asyncio
import os

import pytest

from flashwire_service.compute.written import Written
from flashwire_service.front.replies import MemoryResponse
from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.memory import Memory

MIB = 2**20


@pytest.fixture
def channels():
    pair = Channel.pair()
    yield pair
    for channel in pair:
        channel.close()


def lent(written, channel, job, size=MIB):
    memory = written.take(size)
    if not memory.mapped:
        memory.write([b"x" * size])
    written.lend(channel, job, memory)
    return memory


def test_what_comes_back_is_used_again_with_its_pages(channels):
    written = Written(8 * MIB)
    memory = lent(written, channels[0], 1)
    other = lent(written, channels[0], 2)
    assert other is not memory
    written.returned(channels[0], 1)
    assert lent(written, channels[0], 3) is memory
    assert memory.mapped
    assert memory.view[:MIB] == b"x" * MIB


def test_what_is_lent_is_nobody_elses(channels):
    """Another front end's word, or one that came before, frees nothing."""
    written = Written(8 * MIB)
    memory = lent(written, channels[0], 1)
    written.returned(channels[1], 1)
    written.returned(channels[0], 2)
    assert lent(written, channels[0], 3) is not memory


def test_what_is_never_returned_is_forgotten(channels):
    written = Written(3 * MIB)
    memories = [lent(written, channels[0], number) for number in range(5)]
    assert [memory.fd >= 0 for memory in memories] == [False, False, True, True, True]
    written.returned(channels[0], 0)  # too late


def test_a_front_end_that_is_gone_takes_its_memory_along(channels):
    written = Written(8 * MIB)
    mine, other = lent(written, channels[0], 1), lent(written, channels[1], 2)
    written.lose(channels[0])
    assert (mine.fd >= 0, other.fd >= 0) == (False, True)
    written.returned(channels[1], 2)
    assert written.take(MIB) is other


def test_what_was_not_sent_is_given_back():
    written = Written(8 * MIB)
    memory = written.take(MIB)
    written.give_back(memory)
    assert written.take(MIB) is memory


def sent(size: int, hold: bool) -> tuple[bytes, list[str]]:
    """What a response sends, and whether it says that it is done; a transport may hold pieces."""
    with Memory.create() as source:
        data = os.urandom(size)
        source.write([data])
        memory = Memory.adopt(os.dup(source.fd), size)
    held: list[memoryview | bytes] = []
    received = bytearray()
    said: list[str] = []

    async def send(event):
        body = event.get("body", b"")
        received.extend(body)
        if hold:
            held.append(body)

    response = MemoryResponse(memory, size, "application/msgpack", lambda: said.append("done"))
    asyncio.run(response({"type": "http"}, None, send))  # type: ignore[arg-type]
    assert bytes(received) == data
    assert all(bytes(piece) in data for piece in held)
    return data, said


@pytest.mark.parametrize("size", [1, 2**17, 2**17 + 1, 3 * MIB + 5])
def test_a_response_is_done_when_all_is_sent(size):
    assert sent(size, hold=False)[1] == ["done"]


def test_a_response_whose_pieces_are_held_does_not_say_so():
    assert sent(3 * MIB, hold=True)[1] == []
    assert sent(2**17, hold=True)[1] == ["done"]  # a copy

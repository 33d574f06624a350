"""Owners who send at once are received from in turn."""

from __future__ import annotations

import asyncio

import pytest

from flashwire_service.front.turns import Turns

PIECE = 1000


class Senders:
    """Bodies that ask for one turn after the other; `done` counts the pieces of each owner."""

    def __init__(self, **bodies: int) -> None:
        self.turns = Turns()
        self.done = dict.fromkeys(bodies, 0)
        self.tasks = [
            asyncio.create_task(self._send(owner))
            for owner, count in bodies.items()
            for _ in range(count)
        ]

    async def _send(self, owner: str) -> None:
        self.turns.enter(owner)
        try:
            while True:
                await self.turns.turn(owner, PIECE)
                self.done[owner] += 1
                for _ in range(3):  # until the next piece has been read
                    await asyncio.sleep(0)
        finally:
            self.turns.leave(owner)

    async def until(self, owner: str, pieces: int) -> None:
        end = self.done[owner] + pieces
        for _ in range(10_000):
            if self.done[owner] >= end:
                return
            await asyncio.sleep(0)
        raise TimeoutError(self.done)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


async def test_who_has_many_connections_gets_no_more_than_who_has_one() -> None:
    senders = Senders(many=30, one=1)
    await senders.until("one", 100)
    assert 95 <= senders.done["many"] <= 140  # thirty of them at once before there is another
    await senders.close()


async def test_alone_nobody_waits() -> None:
    turns = Turns()
    turns.enter("me")
    waiting = turns.turn("me", PIECE)
    with pytest.raises(StopIteration):  # it ends without giving way to the loop
        waiting.send(None)
    turns.leave("me")


async def test_one_piece_passes_in_a_turn_of_the_loop() -> None:
    """Also when all are of one owner."""
    senders = Senders(one=30)
    await senders.until("one", 30)
    before = senders.done["one"]
    for _ in range(20):
        await asyncio.sleep(0)
    assert 15 <= senders.done["one"] - before <= 20
    await senders.close()


def test_pieces_are_large_while_one_body_comes_alone() -> None:
    turns = Turns()
    turns.enter("a")
    alone = turns.most
    for other in ("a", "b"):
        turns.enter(other)
        assert turns.most <= alone / 8
        turns.leave(other)
    assert turns.most == alone


async def test_who_does_not_send_keeps_nobody() -> None:
    senders = Senders(busy=2)
    senders.turns.enter("silent")
    await senders.until("busy", 50)
    senders.turns.leave("silent")
    await senders.close()


async def test_what_was_not_sent_is_not_saved_up() -> None:
    senders = Senders(first=1)
    await senders.until("first", 100)
    senders.done["second"] = 0
    senders.tasks.append(asyncio.create_task(senders._send("second")))
    before = senders.done["first"]
    await senders.until("second", 50)
    assert 45 <= senders.done["first"] - before <= 55
    await senders.close()


async def test_who_leaves_is_forgotten() -> None:
    senders = Senders(a=3, b=1)
    await senders.until("b", 10)
    senders.tasks[0].cancel()  # perhaps while it waits
    await senders.until("a", 10)
    await senders.close()
    assert not senders.turns._senders

"""Room for bodies that are being received: counted as they come, shared, given back."""

from __future__ import annotations

import asyncio

import pytest

from flashwire_service.errors import Refusal
from flashwire_service.front import uploads as module
from flashwire_service.front.uploads import Uploads
from flashwire_service.ipc.channel import MAX_INLINE

UNIT = 2 * MAX_INLINE


@pytest.fixture
def uploads() -> Uploads:
    return Uploads(10 * UNIT)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)


async def waits(task: asyncio.Task[None]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not task.done()


async def test_bytes_count_as_they_come_and_are_given_back(uploads: Uploads) -> None:
    with uploads.upload() as one, uploads.upload() as other:
        await one.begin(10 * UNIT)
        assert uploads.held_bytes == 0
        await one.grow(UNIT)
        await one.grow(3 * UNIT)
        await other.grow(2 * UNIT)
        assert uploads.held_bytes == 5 * UNIT
    assert uploads.held_bytes == 0


async def test_small_bodies_always_have_room(uploads: Uploads) -> None:
    with uploads.upload() as large, uploads.upload() as small:
        await large.grow(10 * UNIT)
        await small.begin(MAX_INLINE)
        await small.grow(MAX_INLINE)
        assert uploads.held_bytes == 10 * UNIT


async def test_one_waits_until_there_is_room(uploads: Uploads) -> None:
    with uploads.upload() as second:
        with uploads.upload() as first:
            await first.grow(9 * UNIT)
            begins = asyncio.create_task(second.begin(4 * UNIT))
            assert await waits(begins)
        await begins


async def test_those_under_way_come_first(uploads: Uploads) -> None:
    first, second, third = (uploads.upload().__enter__() for _ in range(3))
    await first.grow(7 * UNIT)
    await second.grow(3 * UNIT)
    begins = asyncio.create_task(third.begin(7 * UNIT))
    assert await waits(begins)
    grows = asyncio.create_task(second.grow(4 * UNIT))
    assert await waits(grows)
    first.__exit__(None, None, None)
    await grows
    assert await waits(begins)  # there would have been room before the second grew
    second.__exit__(None, None, None)
    await begins


@pytest.mark.usefixtures("impatient")
async def test_who_waits_in_vain_is_refused(uploads: Uploads) -> None:
    with uploads.upload() as first, uploads.upload() as second:
        await first.grow(9 * UNIT)
        for attempt in (second.begin(2 * UNIT), second.grow(2 * UNIT)):
            with pytest.raises(Refusal, match=f"{9 * UNIT} of {10 * UNIT} bytes") as caught:
                await attempt
            assert caught.value.code == "queue_full"
        await second.grow(UNIT)  # which there is room for


@pytest.mark.usefixtures("impatient")
async def test_uploads_that_hold_each_other_up_do_not_all_fail(uploads: Uploads) -> None:
    async def receive(pieces: int, delay: float) -> None:
        with uploads.upload() as upload:
            for count in range(1, pieces + 1):
                await upload.grow(count * UNIT)
                await asyncio.sleep(delay)

    results = await asyncio.gather(
        receive(8, 0.001), receive(8, 0.002), receive(8, 0.003), return_exceptions=True
    )
    assert results.count(None) >= 1
    assert all(result is None or isinstance(result, Refusal) for result in results)
    assert uploads.held_bytes == 0


async def test_who_leaves_while_waiting_is_in_nobodys_way(uploads: Uploads) -> None:
    with uploads.upload() as first, uploads.upload() as second, uploads.upload() as third:
        await first.grow(6 * UNIT)
        leaves = asyncio.create_task(second.begin(9 * UNIT))
        assert await waits(leaves)
        follows = asyncio.create_task(third.begin(2 * UNIT))
        assert await waits(follows)
        leaves.cancel()
        await follows
        assert uploads.held_bytes == 6 * UNIT


async def test_what_is_granted_to_one_who_has_just_left_is_free_again(uploads: Uploads) -> None:
    first, second = (uploads.upload().__enter__() for _ in range(2))
    await first.grow(9 * UNIT)
    leaves = asyncio.create_task(second.grow(2 * UNIT))
    assert await waits(leaves)
    first.__exit__(None, None, None)  # grants it
    leaves.cancel()
    await asyncio.wait({leaves})
    second.__exit__(None, None, None)
    assert uploads.held_bytes == 0

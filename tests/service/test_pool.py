"""The pool over real channels: a worker's end is played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from flashwire.wire import TensorRef
from flashwire_service.errors import Refusal
from flashwire_service.front.pool import Answer, Pool, Work
from flashwire_service.ipc.channel import Channel, socketpair
from flashwire_service.ipc.frames import (
    Acquit,
    Attach,
    Cancel,
    Drain,
    Failure,
    Frame,
    Hello,
    Job,
    Ready,
    Reply,
    State,
    Suspect,
)
from flashwire_service.ipc.heartbeat import Heartbeat
from flashwire_service.ipc.memory import Memory
from flashwire_service.quarantine import Entry

Starved = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass
class Played:
    """The worker's end of a channel."""

    channel: Channel
    heartbeat: Heartbeat

    async def next(self) -> tuple[Frame, int | None]:
        for _ in range(500):
            if (got := self.channel.try_recv()) is not None:
                return got
            await asyncio.sleep(0.01)
        raise TimeoutError

    async def job(self) -> Job:
        frame, fd = await self.next()
        if fd is not None:
            os.close(fd)
        assert isinstance(frame, Job)
        return frame

    async def compute(self) -> Job:
        """Take a job and begin."""
        job = await self.job()
        self.heartbeat.busy(job.deadline, job.id)
        return job

    async def die_of_it(self) -> None:
        await self.compute()
        self.channel.close()

    def answer(self, job: Job) -> None:
        self.channel.send(Reply(id=job.id, size=2, body=b"ok"))
        self.heartbeat.idle()


class Ends:
    """A pool, what it told, and the workers that the test plays."""

    def __init__(self) -> None:
        self.drained: list[float] = []
        self.orphaned = 0
        self.pool = Pool(self.drained.append, self._orphan)
        self.played: list[Played] = []

    def _orphan(self) -> None:
        self.orphaned += 1

    async def worker(self, index: int = 0, ready: bool = True) -> Played:
        ours, theirs = socketpair()
        self.pool.attach(index, ours)
        self.played.append(played := Played(Channel(theirs), Heartbeat.create()))
        if ready:
            hello = Hello(worker=index, pid=100 + index, facts={"device": "cpu"})
            played.channel.send(hello, played.heartbeat.memory.fd)
            await self.until(lambda: index in self.pool.facts)
        return played

    async def until(self, condition: object) -> None:
        assert callable(condition)
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise TimeoutError


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    for played in made.played:
        played.channel.close()
        played.heartbeat.close()
    await asyncio.sleep(0.02)


def work(timeout_s: float = 5.0, body: bytes | Memory = b"abc") -> Work:
    tensors = {"q": TensorRef("float32", (1,), ((0, 4),))}
    size = body.size if isinstance(body, Memory) else len(body)
    return Work(route="attention", options={"causal": True}, tensors=tensors, body=body, size=size,
                owner="me", timeout_s=timeout_s)  # fmt: skip


async def refused(running: asyncio.Task[Answer]) -> str:
    with pytest.raises(Refusal) as caught:
        await running
    return caught.value.code


async def test_nobody_is_ready_before_hello(ends: Ends) -> None:
    assert not ends.pool.ready
    await ends.worker(ready=False)
    assert not ends.pool.ready
    assert await refused(asyncio.create_task(ends.pool.run(work()))) == "no_worker"
    await ends.worker(1)
    assert ends.pool.ready
    assert ends.pool.facts == {1: {"device": "cpu", "pid": 101}}


async def test_a_job_and_its_reply(ends: Ends) -> None:
    played = await ends.worker()
    running = asyncio.create_task(ends.pool.run(work()))
    job = await played.job()
    assert (job.route, job.options, job.body, job.size) == (
        "attention",
        {"causal": True},
        b"abc",
        3,
    )
    assert (job.tensors["q"].shape, job.owner) == ((1,), "me")
    assert 4.5 < job.deadline - job.received <= 5
    played.channel.send(Reply(id=job.id, size=2, body=b"ok"))
    answer = await running
    assert (answer.reply.body, answer.memory, answer.worker) == (b"ok", None, 0)


async def test_bodies_go_by_memory_both_ways(ends: Ends) -> None:
    played = await ends.worker()
    memory = Memory.create()
    memory.write([b"q" * 100_000])
    running = asyncio.create_task(ends.pool.run(work(body=memory)))
    frame, fd = await played.next()
    assert isinstance(frame, Job)
    assert fd is not None
    with Memory.receive(fd, frame.size) as received:
        assert bytes(received.view) == b"q" * 100_000
    with Memory.create() as reply:
        reply.write([b"r" * 70_000])
        played.channel.send(Reply(id=frame.id, size=70_000), reply.fd)
    answer = await running
    assert answer.memory is not None
    assert bytes(answer.memory.view) == b"r" * 70_000
    answer.memory.close()
    memory.close()


async def test_a_failure_is_a_refusal(ends: Ends) -> None:
    played = await ends.worker()
    running = asyncio.create_task(ends.pool.run(work()))
    job = await played.job()
    played.channel.send(
        Failure(id=job.id, code="queue_full", detail="full", reasons=("a", "b"), retry_after=7.0)
    )
    with pytest.raises(Refusal) as caught:
        await running
    assert (caught.value.code, caught.value.retry_after) == ("queue_full", 7.0)
    assert caught.value.reasons == ("a", "b")


async def test_a_deadline_cancels_the_job(ends: Ends) -> None:
    played = await ends.worker()
    running = asyncio.create_task(ends.pool.run(work(timeout_s=0.05)))
    job = await played.job()
    assert await refused(running) == "deadline_exceeded"
    assert (await played.next())[0] == Cancel(id=job.id)
    played.channel.send(Reply(id=job.id, size=2, body=b"ok"))  # too late, and no harm
    again = asyncio.create_task(ends.pool.run(work()))
    job = await played.job()
    played.channel.send(Reply(id=job.id, size=3, body=b"new"))
    assert (await again).reply.body == b"new"


async def test_a_caller_who_leaves_cancels_the_job(ends: Ends) -> None:
    played = await ends.worker()
    running = asyncio.create_task(ends.pool.run(work()))
    job = await played.job()
    running.cancel()
    assert (await played.next())[0] == Cancel(id=job.id)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_worker_that_dies_is_missed_by_all_who_wait(ends: Ends) -> None:
    played = await ends.worker()
    running = [asyncio.create_task(ends.pool.run(work())) for _ in range(3)]
    for _ in running:
        await played.job()
    played.channel.close()
    assert [await refused(task) for task in running] == ["worker_died"] * 3
    assert not ends.pool.ready
    assert await refused(asyncio.create_task(ends.pool.run(work()))) == "no_worker"


async def test_another_worker_takes_over_once(ends: Ends) -> None:
    first, second = await ends.worker(0), await ends.worker(1)
    running = asyncio.create_task(ends.pool.run(work()))
    lost = await first.job()
    first.channel.close()
    again = await second.job()
    assert (again.route, again.deadline) == (lost.route, lost.deadline)
    second.channel.send(Reply(id=again.id, size=2, body=b"ok"))
    assert (await running).worker == 1

    third = await ends.worker(0)
    running = asyncio.create_task(ends.pool.run(work()))
    for played in (second, third):
        await played.job()
        played.channel.close()
    assert await refused(running) == "worker_died"


class Told:
    """What the pool tells its supervisor, whose part the test plays."""

    def __init__(self, ends: Ends) -> None:
        ours, theirs = socketpair()
        self.channel = Channel(theirs)
        ends.pool.listen(Channel(ours))
        assert isinstance(self.channel.recv(1)[0], Ready)

    @property
    def frames(self) -> list[Frame]:
        """Since last asked."""
        found = []
        while (got := self.channel.try_recv()) is not None:
            found.append(got[0])
        return found


@pytest.fixture
async def told(ends: Ends) -> AsyncIterator[Told]:
    told = Told(ends)
    yield told
    told.channel.close()
    await ends.until(lambda: ends.orphaned)


def ask(ends: Ends, **more: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(ends.pool.run(work(**more)))


async def test_what_ends_two_workers_is_refused(ends: Ends, told: Told) -> None:
    played = await ends.worker()
    asked = ask(ends)
    await played.die_of_it()
    assert await refused(asked) == "worker_died"
    (suspect,) = told.frames
    played = await ends.worker()
    asked = ask(ends)
    await played.die_of_it()
    assert await refused(asked) == "quarantined"
    assert told.frames == [suspect]
    third = await ends.worker()
    assert await refused(ask(ends)) == "quarantined"
    for other in (ask(ends, body=b"abd"), ask(ends, body=b"abcd")):
        third.answer(await third.compute())
        assert (await other).reply.body == b"ok"
    assert told.frames == []


async def test_a_retry_that_ends_the_other_worker_is_the_last(ends: Ends, told: Told) -> None:
    first, second, third = [await ends.worker(index) for index in range(3)]
    asked = ask(ends)
    await first.die_of_it()
    await second.die_of_it()
    assert await refused(asked) == "quarantined"
    assert third.channel.try_recv() is None
    assert len(told.frames) == 2


async def test_a_suspect_that_a_worker_survives_is_acquitted(ends: Ends, told: Told) -> None:
    for _ in range(3):
        first, second = await ends.worker(0), await ends.worker(1)
        asked = ask(ends)
        await first.die_of_it()
        second.answer(await second.compute())
        assert (await asked).worker == 1
        suspect, acquitted = told.frames
        assert isinstance(suspect, Suspect)
        assert acquitted == Acquit(digest=suspect.digest)


async def test_who_only_waited_is_innocent(ends: Ends, told: Told) -> None:
    only = await ends.worker()
    culprit = ask(ends, body=b"bad")
    await only.compute()
    waiting = ask(ends, body=b"good")
    await only.job()
    only.channel.close()
    assert [await refused(asked) for asked in (culprit, waiting)] == ["worker_died"] * 2
    assert len(told.frames) == 1
    idle = await ends.worker()
    idle.heartbeat.idle()
    asked = ask(ends)
    await idle.job()
    idle.channel.close()
    assert await refused(asked) == "worker_died"
    assert told.frames == []


async def test_who_dies_in_company_is_tried_alone(ends: Ends, told: Told) -> None:
    only = await ends.worker()
    bodies = (b"bad", b"good", b"also good")
    asked = [ask(ends, body=body) for body in bodies]
    jobs = [await only.job() for _ in asked]
    assert [job.alone for job in jobs] == [False] * 3
    asked.append(ask(ends, body=b"waits"))
    await only.job()
    only.heartbeat.busy(time.monotonic() + 9, *(job.id for job in jobs))
    only.channel.close()
    assert [await refused(task) for task in asked] == ["worker_died"] * 4
    suspects = told.frames
    assert [frame.alone for frame in suspects if isinstance(frame, Suspect)] == [False] * 3
    second = await ends.worker()
    again = ask(ends, body=b"good")
    job = await second.compute()
    assert job.alone
    second.answer(job)
    assert (await again).reply.body == b"ok"
    assert [type(frame) for frame in told.frames] == [Acquit]
    for body, alone in ((b"good", False), (b"waits", False), (b"bad", True)):
        again = ask(ends, body=body)
        job = await second.compute()
        assert job.alone == alone
        if body != b"bad":
            second.answer(job)
            await again
    second.channel.close()
    assert await refused(again) == "quarantined"


async def test_who_is_given_up_in_company_is_a_suspect(ends: Ends, told: Told) -> None:
    played = await ends.worker()
    asked = [ask(ends, timeout_s=0.1, body=body) for body in (b"a", b"b", b"c")]
    jobs = [await played.job() for _ in asked]
    played.heartbeat.busy(time.monotonic() + 9, jobs[0].id, jobs[1].id)
    assert [await refused(task) for task in asked] == ["deadline_exceeded"] * 3
    assert {type((await played.next())[0]) for _ in asked} == {Cancel}
    ends.pool.sweep()
    played.channel.close()
    told_of: list[Frame] = []
    await ends.until(lambda: told_of.extend(told.frames) or len(told_of) == 2)
    assert [frame.alone for frame in told_of if isinstance(frame, Suspect)] == [False] * 2


@pytest.mark.parametrize("size", [3, 100_000])
async def test_what_was_given_up_may_yet_end_its_worker(ends: Ends, told: Told, size: int) -> None:
    """A hung worker is killed after the deadlines of all who wait for it."""
    memory = Memory.create()
    memory.write([bytes(size)])
    for deaths in (1, 2):
        played = await ends.worker()
        asked = ask(ends, timeout_s=0.1, body=memory)
        await played.compute()
        assert await refused(asked) == "deadline_exceeded"
        ends.pool.sweep()
        if deaths == 2:
            memory.close()
        played.channel.close()
        await ends.until(lambda: told.frames)
    again = Memory.create()
    again.write([bytes(size)])
    assert await refused(ask(ends, body=again)) == "quarantined"
    again.close()


async def test_what_was_given_up_and_has_ended_ends_nobody(ends: Ends, told: Told) -> None:
    for swept in (True, False):
        played = await ends.worker()
        asked = ask(ends, timeout_s=0.1)
        await played.compute()
        assert await refused(asked) == "deadline_exceeded"
        played.heartbeat.idle()
        if swept:
            ends.pool.sweep()
        played.channel.close()
        await ends.until(lambda: not ends.pool.ready)
    await asyncio.sleep(0.02)
    assert told.frames == []


async def test_all_front_ends_know_what_the_supervisor_knows(ends: Ends, told: Told) -> None:
    played = await ends.worker()
    asked = ask(ends)
    await played.die_of_it()
    assert await refused(asked) == "worker_died"
    (suspect,) = told.frames
    assert isinstance(suspect, Suspect)
    book = [Entry(suspect.head, suspect.digest, 2, time.monotonic() + 60)]
    ends.pool._suspects.install([])
    told.channel.send(State(suspects=tuple(book)))
    played = await ends.worker()
    await ends.until(lambda: not ends.pool._suspects.empty)
    assert await refused(ask(ends)) == "quarantined"
    told.channel.send(State())
    await ends.until(lambda: ends.pool._suspects.empty)
    asked = ask(ends)
    played.answer(await played.compute())
    assert (await asked).reply.body == b"ok"


async def test_workers_that_are_told_to_end_die_of_nothing(ends: Ends, told: Told) -> None:
    played = await ends.worker()
    asked = ask(ends)
    await played.compute()
    ends.pool.drain()
    played.channel.close()
    assert await refused(asked) == "worker_died"
    assert told.frames == []


async def test_what_a_residual_needs_is_not_elsewhere(ends: Ends) -> None:
    first, _ = await ends.worker(0), await ends.worker(1)
    running = asyncio.create_task(ends.pool.run(work(), 0))
    await first.job()
    first.channel.close()
    assert await refused(running) == "worker_died"


async def test_a_successor_takes_the_place(ends: Ends) -> None:
    first = await ends.worker()
    running = asyncio.create_task(ends.pool.run(work()))
    await first.job()
    second = await ends.worker()  # attached before the death of the first is seen
    assert await refused(running) == "worker_died"
    again = asyncio.create_task(ends.pool.run(work()))
    job = await second.job()
    second.channel.send(Reply(id=job.id, size=2, body=b"ok"))
    assert (await again).reply.body == b"ok"


async def test_the_least_busy_worker_or_the_named_one(ends: Ends) -> None:
    a, b = await ends.worker(0), await ends.worker(1)
    tasks = [asyncio.create_task(ends.pool.run(work())) for _ in range(2)]
    jobs = [await a.job(), await b.job()]
    tasks.append(asyncio.create_task(ends.pool.run(work(), 1)))
    jobs.append(await b.job())
    for played, job in zip((a, b, b), jobs, strict=True):
        played.channel.send(Reply(id=job.id, size=1, body=b"x"))
    assert [answer.worker for answer in await asyncio.gather(*tasks)] == [0, 1, 1]
    assert await refused(asyncio.create_task(ends.pool.run(work(), 2))) == "gone"


async def test_the_supervisors_frames(ends: Ends) -> None:
    ours, theirs = socketpair()
    supervisor = Channel(theirs)
    ends.pool.listen(Channel(ours))
    assert isinstance(supervisor.recv(1)[0], Ready)
    front_end, worker_end = socketpair()
    with front_end:
        supervisor.send(Attach(peer=3), front_end.fileno())
    worker = Channel(worker_end)
    worker.send(Hello(worker=3, pid=1, facts={}))
    await ends.until(lambda: ends.pool.ready)
    supervisor.send(Drain(grace=2.5))
    await ends.until(lambda: ends.drained == [2.5])
    ends.pool.drain()
    assert not ends.pool.ready
    supervisor.close()
    await ends.until(lambda: ends.orphaned == 1)
    worker.close()
    await asyncio.sleep(0.02)


@pytest.mark.parametrize("end", ["cancelled", "too late"])
async def test_a_reply_that_comes_as_its_caller_goes_is_let_go(ends: Ends, end: str) -> None:
    """In the very turn of the loop in which the wait for it ends."""
    played = await ends.worker()
    before = len(os.listdir("/proc/self/fd"))
    running = asyncio.create_task(ends.pool.run(work(timeout_s=0.3)))
    job = await played.job()
    with Memory.create(50_000) as reply:
        played.channel.send(Reply(id=job.id, size=reply.size), reply.fd)
    if end == "cancelled":
        while not next(iter(ends.pool._workers.values())).waiting[job.id].done():
            await asyncio.sleep(0)
        running.cancel()
    else:
        time.sleep(0.4)  # both are due when the loop goes on
    with contextlib.suppress(asyncio.CancelledError, Refusal):
        answer = await running
        answer.memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_reply_for_which_there_is_no_descriptor_is_a_refusal(
    ends: Ends, starved: Starved
) -> None:
    played = await ends.worker()

    async def exchange(reply: Memory) -> str:
        running = asyncio.create_task(ends.pool.run(work()))
        job = await played.job()
        played.channel.send(Reply(id=job.id, size=reply.size), reply.fd)
        return await refused(running)

    with Memory.create(50_000) as reply, starved():
        assert await exchange(reply) == "queue_full"
    running = asyncio.create_task(ends.pool.run(work()))
    job = await played.job()
    played.channel.send(Reply(id=job.id, size=2, body=b"ok"))
    assert (await running).reply.body == b"ok"


async def test_a_worker_that_does_not_arrive_is_a_reason_to_be_replaced(
    ends: Ends, starved: Starved
) -> None:
    ours, theirs = socketpair()
    supervisor = Channel(theirs)
    ends.pool.listen(Channel(ours))
    front_end, worker_end = socketpair()
    with front_end, worker_end, starved():
        supervisor.send(Attach(peer=0), front_end.fileno())
        await ends.until(lambda: ends.orphaned == 1)
    supervisor.close()
    await asyncio.sleep(0.02)


async def test_nothing_leaks(ends: Ends) -> None:
    played = await ends.worker()

    async def exchange() -> None:
        memory = Memory.create()
        memory.write([b"q" * 50_000])
        running = asyncio.create_task(ends.pool.run(work(body=memory, timeout_s=0.5)))
        job = await played.job()
        with Memory.create() as reply:
            reply.write([b"r" * 50_000])
            played.channel.send(Reply(id=job.id, size=50_000), reply.fd)
        answer = await running
        assert answer.memory is not None
        answer.memory.close()
        memory.close()

    await exchange()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await exchange()
    assert len(os.listdir("/proc/self/fd")) == before

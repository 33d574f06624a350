"""The worker's queue: limits, order, deadlines, abandoned work, memory freed in every case."""

import threading
import time

import pytest

from flashwire_service.compute.intake import Intake, Ticket
from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.frames import Job
from flashwire_service.ipc.memory import Memory


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def intake(clock):
    return Intake(max_requests=3, max_bytes=1000, clock=clock)


@pytest.fixture
def channel():
    a, b = Channel.pair()
    yield a
    a.close()
    b.close()


def ticket(channel, number, size=10, deadline=200.0):
    memory = Memory.create(size)
    job = Job(id=number, route="attention", size=size, deadline=deadline)
    return Ticket(job, channel, memory)


def freed(memory: Memory) -> bool:
    return memory.fd < 0


def test_first_come_first_served(intake, channel):
    for number in range(3):
        assert intake.offer(ticket(channel, number)) is None
    assert intake.depth == 3
    assert [intake.take(0).job.id for _ in range(3)] == [0, 1, 2]
    assert intake.take(0) is None


def test_one_request_too_many_is_refused_and_freed(intake, channel):
    for number in range(3):
        intake.offer(ticket(channel, number))
    extra = ticket(channel, 7)
    memory = extra.memory
    failure = intake.offer(extra)
    assert (failure.id, failure.code) == (7, "queue_full")
    assert "3 requests" in failure.detail
    assert freed(memory)
    assert intake.depth == 3


def test_bytes_are_bounded_but_a_job_alone_always_fits(intake, channel):
    assert intake.offer(ticket(channel, 0, size=5000)) is None
    assert intake.offer(ticket(channel, 1, size=1)).code == "queue_full"
    intake.take(0)
    assert intake.offer(ticket(channel, 2, size=999)) is None
    assert intake.offer(ticket(channel, 3, size=1)) is None
    assert intake.offer(ticket(channel, 4, size=1)).code == "queue_full"


def test_retry_after_follows_the_measured_service_time(intake, channel):
    for number in range(50):
        intake.offer(ticket(channel, number))
        intake.finish(intake.take(0), seconds=2.0)
    for number in range(3):
        intake.offer(ticket(channel, number))
    assert intake.offer(ticket(channel, 9)).retry_after == pytest.approx(8.0, rel=0.01)


def test_late_work_is_dropped_unstarted_and_freed(intake, channel, clock):
    late = ticket(channel, 0, deadline=101.0)
    memory = late.memory
    intake.offer(late)
    intake.offer(ticket(channel, 1))
    clock.now = 101.0
    assert intake.take(0).job.id == 1
    assert freed(memory)


def test_late_work_makes_room_in_a_full_queue(intake, channel, clock):
    for number in range(3):
        intake.offer(ticket(channel, number, deadline=101.0))
    clock.now = 102.0
    assert intake.offer(ticket(channel, 3)) is None
    assert intake.depth == 1


def test_cancel_drops_waiting_work_of_that_caller_only(intake, channel):
    other, far = Channel.pair()
    intake.offer(ticket(other, 0))
    mine = ticket(channel, 0, size=600)
    memory = mine.memory
    intake.offer(mine)
    intake.cancel(channel, 0)
    assert freed(memory)
    assert intake.offer(ticket(channel, 1, size=600)) is None  # its bytes count no more
    assert intake.take(0).channel is other
    other.close()
    far.close()


def test_cancel_of_running_work_only_marks_it(intake, channel):
    intake.offer(ticket(channel, 0))
    running = intake.take(0)
    memory = running.memory
    intake.cancel(channel, 1)
    assert not running.abandoned
    intake.cancel(channel, 0)
    assert running.abandoned
    assert not freed(memory)
    intake.finish(running, 0.1)
    assert freed(memory)


def test_a_front_that_goes_takes_its_jobs_along(intake, channel):
    for number in range(3):
        intake.offer(ticket(channel, number))
    running = intake.take(0)
    intake.drop_channel(channel)
    assert running.abandoned
    assert intake.depth == 0
    assert intake.take(0) is None


def test_take_wakes_up_for_an_offer(channel):
    intake = Intake(1, 1000)
    late = threading.Timer(0.05, intake.offer, [ticket(channel, 5, deadline=1e12)])
    late.start()
    started = time.monotonic()
    assert intake.take(10).job.id == 5
    assert time.monotonic() - started < 5
    late.join()


def test_a_closed_intake_is_emptied_without_waiting(channel):
    intake = Intake(1, 1000)
    intake.offer(ticket(channel, 0, deadline=1e12))
    intake.close()
    assert not intake.exhausted
    assert intake.take(10).job.id == 0
    assert intake.exhausted
    started = time.monotonic()
    assert intake.take(10) is None
    assert time.monotonic() - started < 5

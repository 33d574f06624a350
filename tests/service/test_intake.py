"""The worker's queue: limits, order, owners, deadlines, abandoned work, memory freed always."""

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
    return Intake(max_requests=3, max_bytes=1000, clock=clock, chance=lambda: 0.0)


@pytest.fixture
def channel():
    a, b = Channel.pair()
    yield a
    a.close()
    b.close()


def ticket(channel, number, owner="", size=10, deadline=200.0, **fields):
    memory = Memory.create(size)
    job = Job(id=number, route="attention", size=size, deadline=deadline, owner=owner, **fields)
    return Ticket(job, channel, memory)


def accepted(intake, ticket) -> bool:
    """Whether it was queued, and nobody had to leave for it."""
    return not intake.offer(ticket)


def refused(intake, ticket):
    """The failure of a ticket that was not queued."""
    ((other, failure),) = intake.offer(ticket)
    assert other is ticket
    assert failure.id == ticket.job.id
    assert failure.code == "queue_full"
    return failure


def work(intake, seconds=1.0):
    """Do what is next. Returns its id."""
    next_one = intake.take(0)
    intake.finish(next_one, seconds)
    return next_one.job.id


def freed(memory: Memory) -> bool:
    return memory.fd < 0


def test_first_come_first_served(intake, channel):
    for number in range(3):
        assert accepted(intake, ticket(channel, number))
    assert intake.depth == 3
    assert [work(intake) for _ in range(3)] == [0, 1, 2]
    assert intake.take(0) is None


def test_one_request_too_many_is_refused_and_freed(intake, channel):
    for number in range(3):
        intake.offer(ticket(channel, number))
    extra = ticket(channel, 7)
    memory = extra.memory
    assert "3 requests" in refused(intake, extra).detail
    assert freed(memory)
    assert intake.depth == 3


def test_bytes_are_bounded_but_a_job_alone_always_fits(intake, channel):
    assert accepted(intake, ticket(channel, 0, size=5000))
    assert "1000 bytes" in refused(intake, ticket(channel, 1, size=1)).detail
    work(intake)
    assert accepted(intake, ticket(channel, 2, size=999))
    assert accepted(intake, ticket(channel, 3, size=1))
    refused(intake, ticket(channel, 4, size=1))


def test_device_memory_is_bounded_but_a_job_alone_always_fits(clock, channel):
    intake = Intake(9, 1000, 500, clock=clock)
    assert accepted(intake, ticket(channel, 0, device_bytes=800))
    assert "500 of the device" in refused(intake, ticket(channel, 1, device_bytes=1)).detail
    work(intake)
    assert accepted(intake, ticket(channel, 2, device_bytes=499))
    assert accepted(intake, ticket(channel, 3, device_bytes=1))
    refused(intake, ticket(channel, 4, device_bytes=1))


def test_what_waits_is_shown_on_every_change(clock, channel):
    shown = []
    intake = Intake(2, 1000, clock=clock, watch=shown.append)
    intake.offer(ticket(channel, 0, size=10, device_bytes=7))
    intake.offer(ticket(channel, 1, size=20, deadline=clock() + 1))
    refused(intake, ticket(channel, 2))
    intake.take(0)
    assert shown == [(1, 10, 7), (2, 30, 7), (2, 30, 7), (1, 20, 0)]
    intake.offer(ticket(channel, 3, size=40))
    intake.cancel(channel, 3)
    intake.drop_channel(channel)
    assert shown[4:] == [(2, 60, 0), (1, 20, 0), (0, 0, 0)]


def test_retry_after_is_the_time_to_drain_what_waits_and_runs(intake, channel):
    for number in range(50):
        intake.offer(ticket(channel, number))
        work(intake, seconds=2.0)
    for number in range(3):
        intake.offer(ticket(channel, number))
    assert refused(intake, ticket(channel, 9)).retry_after == pytest.approx(8.0, rel=0.01)


def test_retry_after_differs_and_is_never_too_short(clock, channel):
    chance = [0.0, 0.999]
    intake = Intake(1, 1000, clock=clock, chance=lambda: chance[0])
    for seconds, soonest, latest in ((0.01, 1.0, 1.0), (10.0, 20.0, 30.0)):
        for _ in range(50):
            intake.offer(ticket(channel, 0))
            work(intake, seconds)
        intake.offer(ticket(channel, 0))
        times = []
        for chance[0] in (0.0, 0.999):
            times.append(refused(intake, ticket(channel, 1)).retry_after)
        assert times == pytest.approx([soonest, latest], rel=0.01)
        work(intake, seconds)


def test_owners_take_turns_however_much_one_asks_for(clock, channel):
    intake = Intake(20, 1000, clock=clock)
    for number in range(6):
        intake.offer(ticket(channel, number, "many"))
    done = [work(intake)]
    for number in (10, 11, 12):
        intake.offer(ticket(channel, number, "few"))
    done += [work(intake) for _ in range(8)]
    assert done == [0, 10, 1, 11, 2, 12, 3, 4, 5]


def test_owners_have_equal_time_not_equal_numbers(clock, channel):
    intake = Intake(20, 1000, clock=clock)
    for number in range(9):
        intake.offer(ticket(channel, number, "short"))
        intake.offer(ticket(channel, 100 + number, "long"))
    spent = {"short": 0.0, "long": 0.0}
    for _ in range(8):
        running = intake.take(0)
        seconds = 3.0 if running.job.owner == "long" else 1.0
        spent[running.job.owner] += seconds
        intake.finish(running, seconds)
    assert spent == {"short": 6.0, "long": 6.0}


def test_time_not_used_is_not_saved_up(clock, channel):
    intake = Intake(30, 1000, clock=clock)
    for number in range(20):
        intake.offer(ticket(channel, number, "busy"))
    for _ in range(10):
        work(intake)
    for number in range(100, 110):
        intake.offer(ticket(channel, number, "late"))
    assert [work(intake) for _ in range(6)] == [100, 10, 101, 11, 102, 12]


def test_who_leaves_and_comes_back_has_still_had_its_time(clock, channel):
    """Otherwise one could ask, cancel, and be first again."""
    intake = Intake(30, 1000, clock=clock)
    intake.offer(ticket(channel, 0, "a"))
    for number in (100, 101, 102):
        intake.offer(ticket(channel, number, "b"))
    assert work(intake, 1.5) == 0
    intake.offer(ticket(channel, 1, "a"))
    assert [work(intake) for _ in range(3)] == [100, 101, 1]


def test_a_full_queue_makes_room_for_who_holds_less(intake, channel):
    tickets = [ticket(channel, number, "many") for number in range(3)]
    memory = tickets[2].memory
    for each in tickets:
        intake.offer(each)
    ((leaving, failure),) = intake.offer(ticket(channel, 7, "few"))
    assert leaving is tickets[2]
    assert (failure.id, failure.code) == (2, "queue_full")
    assert freed(memory)
    assert intake.depth == 3
    refused(intake, ticket(channel, 8, "few"))  # it would hold as many
    refused(intake, ticket(channel, 9, "many"))
    assert [work(intake) for _ in range(3)] == [0, 7, 1]


def test_the_only_place_goes_to_whose_job_does_not_run(clock, channel):
    intake = Intake(1, 1000, clock=clock)
    intake.offer(ticket(channel, 0, "many"))
    running = intake.take(0)
    intake.offer(ticket(channel, 1, "many"))
    ((leaving, _),) = intake.offer(ticket(channel, 7, "few"))
    assert leaving.job.id == 1
    refused(intake, ticket(channel, 2, "many"))
    intake.finish(running, 1.0)
    assert intake.take(0).job.id == 7


def test_bytes_make_room_as_requests_do(intake, channel):
    for number, size in enumerate((600, 400)):
        intake.offer(ticket(channel, number, "large", size=size))
    ((leaving, _),) = intake.offer(ticket(channel, 7, "small", size=300))
    assert leaving.job.id == 1
    refused(intake, ticket(channel, 8, "small", size=400))  # it would hold 700 of 1000


def test_nobody_leaves_for_who_cannot_be_let_in(intake, channel):
    intake.offer(ticket(channel, 0, "a", size=450))
    intake.offer(ticket(channel, 1, "a", size=100))
    intake.offer(ticket(channel, 2, "b", size=450))
    refused(intake, ticket(channel, 3, "c", size=540))
    assert intake.depth == 3


def test_an_owner_has_its_own_limit(clock, channel):
    intake = Intake(9, 1000, clock=clock)
    for number in range(2):
        assert accepted(intake, ticket(channel, number, "me", max_queued=2))
    third = ticket(channel, 2, "me", max_queued=2)
    memory = third.memory
    assert "its limit: 2" in refused(intake, third).detail
    assert freed(memory)
    assert accepted(intake, ticket(channel, 3, "you", max_queued=2))
    work(intake)
    assert accepted(intake, ticket(channel, 4, "me", max_queued=2))


def test_late_work_counts_for_no_limit_of_its_owner(intake, channel, clock):
    intake.offer(ticket(channel, 0, "me", max_queued=1, deadline=101.0))
    clock.now = 102.0
    assert accepted(intake, ticket(channel, 1, "me", max_queued=1))


def test_nothing_is_kept_of_owners_who_are_gone(clock, channel):
    intake = Intake(9, 1000, clock=clock)
    intake.offer(ticket(channel, 0, "stays"))
    for number in range(1, 200):
        intake.offer(ticket(channel, number, f"owner {number}"))
        work(intake, 0.0)
    assert len(intake._lines._lines) <= 2


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
    assert accepted(intake, ticket(channel, 3))
    assert intake.depth == 1


def test_cancel_drops_waiting_work_of_that_caller_only(intake, channel):
    other, far = Channel.pair()
    intake.offer(ticket(other, 0))
    mine = ticket(channel, 0, size=600)
    memory = mine.memory
    intake.offer(mine)
    intake.cancel(channel, 0)
    assert freed(memory)
    assert accepted(intake, ticket(channel, 1, size=600))  # its bytes count no more
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

"""The intake thread of a worker over real sockets, with this test as its compute loop."""

import contextlib
import dataclasses
import errno
import os
import threading
import time

import pytest

from flashwire_service.compute.intake import Intake
from flashwire_service.compute.links import Links
from flashwire_service.ipc.channel import Channel, ChannelClosed, socketpair
from flashwire_service.ipc.frames import Attach, Cancel, Drain, Failure, Hello, Job, Reply
from flashwire_service.ipc.memory import Memory

PATIENCE_S = 10.0
HELLO = Hello(worker=2, pid=1, facts={"device": "cpu"})


class Worker:
    """Links and intake as a worker has them."""

    def __init__(self) -> None:
        self.control, theirs = Channel.pair()
        self.intake = Intake(max_requests=2, max_bytes=10**6)
        self.links = Links(theirs, self.intake, HELLO)
        self.thread = threading.Thread(target=self.links.run)
        self.thread.start()

    def close(self) -> None:
        self.control.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def attach(self, peer: int = 0) -> Channel:
        ours, theirs = socketpair()
        with theirs:
            self.control.send(Attach(peer=peer), theirs.fileno())
        front = Channel(ours)
        assert front.recv(PATIENCE_S)[0] == HELLO
        return front


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def front(worker):
    channel = worker.attach()
    yield channel
    channel.close()


def wait_until(check):
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def job(number: int, size: int = 4, body: bytes | None = b"body") -> Job:
    deadline = time.monotonic() + 60
    return Job(id=number, route="attention", size=size, body=body, deadline=deadline)


def take(worker):
    ticket = worker.intake.take(PATIENCE_S)
    assert ticket is not None
    return ticket


def test_a_job_arrives_with_its_memory_and_its_answer_goes_back(worker, front):
    with Memory.create() as memory:
        memory.write([b"x" * 5000])
        front.send(job(1, size=5000, body=None), memory.fd)
    ticket = take(worker)
    assert ticket.memory.view == b"x" * 5000
    worker.intake.finish(ticket, 0.1)
    with Memory.create(10) as result:
        worker.links.answer(ticket, Reply(id=1, size=10), result.fd)
    frame, fd = front.recv(PATIENCE_S)
    assert frame == Reply(id=1, size=10)
    assert os.fstat(fd).st_size == 10
    os.close(fd)


def test_a_full_queue_is_answered_while_the_compute_loop_is_busy(worker, front):
    for number in range(3):
        front.send(job(number))
    refusal = front.recv(PATIENCE_S)[0]
    assert (refusal.id, refusal.code) == (2, "queue_full")
    assert refusal.retry_after > 0


def test_a_job_for_which_there_is_no_descriptor_is_refused(worker, front, starved, monkeypatch):
    def refused(number):
        with Memory.create(5000) as memory:
            limited = starved if number == 1 else contextlib.nullcontext
            with limited():
                front.send(job(number, size=5000, body=None), memory.fd)
                return front.recv(PATIENCE_S)[0]

    def no_mapping(fd, size):
        os.close(fd)
        raise OSError(errno.ENOMEM, "no mapping left")

    assert (refused(1).id, refused(1).code) == (1, "queue_full")
    with monkeypatch.context() as patched:
        patched.setattr(Memory, "receive", no_mapping)
        assert (refused(2).id, refused(2).code) == (2, "queue_full")
    front.send(job(3))
    assert take(worker).job.id == 3


def test_an_answer_that_cannot_wait_for_want_of_descriptors_is_a_refusal(worker, front, starved):
    front.send(job(1))
    ticket = take(worker)
    number = 100
    while not ticket.channel.waiting:  # what is sent now waits, and its descriptor is duplicated
        worker.links.answer(ticket, Reply(id=number, size=0, body=bytes(20000)))
        number += 1
    with Memory.create(10) as memory, starved():
        assert not worker.links.answer(ticket, Reply(id=1, size=10), memory.fd)
    while (got := front.recv(PATIENCE_S))[0].id >= 100:
        pass
    assert (got[0].id, got[0].code) == (1, "queue_full")


def test_whose_place_goes_to_another_is_told(worker, front):
    other = worker.attach(peer=1)
    for number in (1, 2):
        front.send(dataclasses.replace(job(number), owner="many"))
    wait_until(lambda: worker.intake.depth == 2)
    other.send(dataclasses.replace(job(3), owner="few"))
    failure, _ = front.recv(PATIENCE_S)
    assert (failure.id, failure.code) == (2, "queue_full")
    assert [take(worker).job.id for _ in range(2)] == [1, 3]
    other.close()


def test_cancel_takes_a_job_out_of_the_queue(worker, front):
    front.send(job(1))
    front.send(job(2))
    wait_until(lambda: worker.intake.depth == 2)
    front.send(Cancel(id=1))
    wait_until(lambda: worker.intake.depth == 1)
    assert take(worker).job.id == 2


def test_jobs_of_a_front_that_ends_are_dropped(worker):
    front = worker.attach(peer=1)
    front.send(job(1))
    running = take(worker)
    front.send(job(2))
    wait_until(lambda: worker.intake.depth == 1)
    front.close()
    wait_until(lambda: worker.intake.depth == 0)
    assert running.abandoned
    assert not worker.links.answer(running, Failure(id=1, code="internal", detail=""))  # to nobody
    worker.intake.finish(running, 0.1)


def test_a_front_that_does_not_read_blocks_neither_the_loop_nor_other_fronts(worker, front):
    deaf = worker.attach(peer=5)
    deaf.send(job(1))
    ticket = take(worker)
    replies = 200
    for number in range(replies):  # far more than a socket holds
        worker.links.answer(ticket, Reply(id=number, size=0, body=bytes(20000)))
    assert ticket.channel.waiting
    front.send(job(7))
    other = take(worker)
    worker.links.answer(other, Reply(id=7, size=0))
    assert front.recv(PATIENCE_S)[0].id == 7
    assert [deaf.recv(PATIENCE_S)[0].id for _ in range(replies)] == list(range(replies))
    deaf.close()


def test_a_new_socket_to_the_same_front_replaces_the_old(worker):
    old = worker.attach(peer=3)
    new = worker.attach(peer=3)
    with pytest.raises(ChannelClosed):
        old.recv(PATIENCE_S)
    old.close()
    new.send(job(4))
    assert take(worker).job.id == 4
    new.close()


def test_drain_closes_the_intake(worker):
    worker.control.send(Drain(grace=0))
    wait_until(lambda: worker.intake.exhausted)


def test_the_end_of_the_lifeline_ends_the_thread_and_all_channels(worker, front):
    worker.control.close()
    worker.thread.join(PATIENCE_S)
    assert not worker.thread.is_alive()
    with pytest.raises(ChannelClosed):
        front.recv(PATIENCE_S)


def test_a_frame_that_is_not_for_workers_is_a_bug_that_shows():
    control, theirs = Channel.pair()
    links = Links(theirs, Intake(1, 1), HELLO)
    control.send(HELLO)
    with pytest.raises(TypeError, match="hello"):
        links.run()
    control.close()


class Loop:
    """A compute loop that reads its sockets itself; each job lasts until `release` is set."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.readers: list[str] = []
        self.taken: list[int] = []
        self.release = threading.Event()
        self._end = False
        worker.intake.offer = self._offered(worker.intake.offer)
        self._thread = threading.Thread(target=self._run, name="compute")
        self._thread.start()

    def _offered(self, offer):
        def seen(ticket):
            self.readers.append(threading.current_thread().name)
            return offer(ticket)

        return seen

    def _run(self) -> None:
        intake = self._worker.intake
        while not self._end:
            self._worker.links.attend(0.05, lambda: intake.depth > 0)
            ticket = intake.take(0)
            if ticket is not None:
                self.taken.append(ticket.job.id)
                self.release.wait(PATIENCE_S)
                intake.finish(ticket, 0.0)

    def close(self) -> None:
        self._end = True
        self.release.set()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def loop(worker, front):
    loop = Loop(worker)
    yield loop
    loop.close()


def test_between_jobs_the_loop_itself_reads(loop, front):
    loop.release.set()
    time.sleep(0.2)  # the thread that stood in for it has gone to sleep
    for number in range(50):
        front.send(job(number))
        wait_until(lambda: loop.taken[-1:] == [number])  # noqa: B023
    assert set(loop.readers) == {"compute"}


def test_while_a_job_lasts_the_thread_stands_in(loop, worker, front):
    front.send(job(1))
    wait_until(lambda: loop.taken == [1])
    for number in (2, 3, 4):  # of which two may wait
        front.send(job(number))
    refusal, _ = front.recv(PATIENCE_S)
    assert (refusal.id, refusal.code) == (4, "queue_full")
    front.send(Cancel(id=2))
    wait_until(lambda: worker.intake.depth == 1)
    loop.release.set()
    wait_until(lambda: loop.taken == [1, 3])
    assert loop.readers[1] != "compute"


def test_the_end_of_the_lifeline_is_seen_by_whoever_reads(loop, worker, front):
    worker.control.close()
    worker.thread.join(PATIENCE_S)
    assert not worker.thread.is_alive()
    loop.close()

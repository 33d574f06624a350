"""The sockets of a worker, which feed its queue.

Between two jobs the compute loop reads them itself: passing each job from thread to thread would
cost more than a small one takes to compute. While a job lasts, the intake thread stands in, so that
a full queue, a caller's leaving and the end of the lifeline never wait for it. Neither waits for a
peer: an answer that a front end is slow to take stays in that channel's outbox.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from flashwire_service.compute.intake import Intake, Ticket
from flashwire_service.errors import EXHAUSTED, is_exhaustion
from flashwire_service.ipc.channel import Channel, ChannelClosed
from flashwire_service.ipc.frames import (
    Attach,
    Cancel,
    Drain,
    Failure,
    Frame,
    Hello,
    Job,
    Reply,
)
from flashwire_service.ipc.memory import Memory

STAND_IN_S = 0.005  # of a job, before the intake thread looks after the sockets
_READS_PER_TURN = 64  # of one peer


class Links:
    """The channels to the front ends, and the control channel, which is also the lifeline."""

    def __init__(
        self, control: Channel, intake: Intake, hello: Hello, page: int | None = None
    ) -> None:
        """`page` is the descriptor of the heartbeat, which goes with each Hello."""
        self._control = control
        self._intake = intake
        self._hello = hello
        self._page = page
        self._fronts: dict[int, Channel] = {}
        self._reading = threading.Lock()  # held by whoever reads the sockets
        self._left: float | None = 0.0  # when the compute loop left them; None: it is there
        self._idle = False  # nothing came of late
        self._needed = threading.Event()  # not set while the intake thread may sleep
        self._needed.set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    @property
    def closed(self) -> bool:
        """Whether the lifeline has ended."""
        return self._control.closed

    def attend(self, timeout: float, until: Callable[[], bool]) -> None:
        """For the compute loop: read what has come, and then what comes, until something is true or
        so many seconds have passed.
        """
        self._left = None
        if not self._reading.acquire(blocking=False):
            with contextlib.suppress(OSError):  # closed meanwhile
                os.eventfd_write(self._wake, 1)
            self._reading.acquire()
        if self._idle:
            self._needed.clear()
        try:
            end = time.monotonic() + timeout
            if not self.closed:
                self._turn(0)
            while not (ended := until() or self.closed) and (left := end - time.monotonic()) > 0:
                self._turn(left)
            self._idle = not ended
        finally:
            self._left = time.monotonic()
            self._reading.release()
            self._needed.set()

    def run(self) -> None:
        """For the intake thread: stand in for the compute loop, until the lifeline ends. Any
        exception leaves a worker that hears nobody.
        """
        try:
            while not self.closed:
                self._needed.wait()
                if self._stand_in():
                    with self._reading:
                        if self._stand_in():
                            self._turn(None)
                else:
                    time.sleep(STAND_IN_S)
        finally:
            with self._reading:
                for channel in (self._control, *self._fronts.values()):
                    channel.close()
                self._selector.close()
                os.close(self._wake)

    def _stand_in(self) -> bool:
        left = self._left
        return left is not None and time.monotonic() - left >= STAND_IN_S and not self.closed

    def answer(self, ticket: Ticket, frame: Reply | Failure, fd: int | None = None) -> bool:
        """Send an answer; called by the compute loop. False when its front end is gone, or was sent
        a refusal in its place.
        """
        try:
            ticket.channel.post(frame, fd)
        except ChannelClosed:
            return False
        except OSError as e:
            if not is_exhaustion(e) or fd is None:
                raise
            self.answer(ticket, _exhausted(ticket.job))
            return False
        if ticket.channel.waiting:
            os.eventfd_write(self._wake, 1)
        return True

    def _turn(self, timeout: float | None) -> None:
        for key, events in self._selector.select(timeout):
            if key.fileobj == self._wake:
                os.eventfd_read(self._wake)
                self._watch_outboxes()
                continue
            channel = key.fileobj
            if not isinstance(channel, Channel) or channel.closed:
                continue  # replaced earlier in this turn
            if events & selectors.EVENT_WRITE:
                self._flush(channel)
            if events & selectors.EVENT_READ:
                self._read(channel)

    def _read(self, channel: Channel) -> None:
        try:
            for _ in range(_READS_PER_TURN):
                if channel.closed or (got := channel.try_recv()) is None:
                    return
                self._take(channel, *got)
        except ChannelClosed:
            if channel is self._control:  # the supervisor is gone, or wants this process gone
                self._control.close()
            else:
                self._lose(channel)

    def _take(self, channel: Channel, frame: Frame, fd: int | None) -> None:
        if isinstance(frame, Job):
            self._admit(channel, frame, fd)
        elif isinstance(frame, Cancel):
            self._intake.cancel(channel, frame.id)
        elif isinstance(frame, Attach) and fd is not None:
            self._attach(frame.peer, Channel(socket.socket(fileno=fd)))
        elif isinstance(frame, Drain):
            self._intake.close()
        else:
            raise TypeError(f"a worker takes no {frame.kind}")

    def _admit(self, channel: Channel, job: Job, fd: int | None) -> None:
        ticket = Ticket(job, channel)
        try:
            ticket.memory = None if fd is None else Memory.receive(fd, job.size)
            lost = fd is None and job.body is None and job.size > 0
        except OSError as e:
            if not is_exhaustion(e):
                raise
            lost = True
        refused = [(ticket, _exhausted(job))] if lost else self._intake.offer(ticket)
        for other, failure in refused:
            self.answer(other, failure)

    def _attach(self, peer: int, channel: Channel) -> None:
        if peer in self._fronts:
            self._lose(self._fronts[peer])
        self._fronts[peer] = channel
        self._selector.register(channel, selectors.EVENT_READ)
        try:
            channel.post(self._hello, self._page)
        except ChannelClosed:
            self._lose(channel)

    def _lose(self, channel: Channel) -> None:
        """Forget a front end that is gone, and what it asked for."""
        self._fronts = {peer: c for peer, c in self._fronts.items() if c is not channel}
        self._selector.unregister(channel)
        self._intake.drop_channel(channel)
        channel.close()

    def _watch_outboxes(self) -> None:
        for channel in self._fronts.values():
            if channel.waiting:
                self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _flush(self, channel: Channel) -> None:
        try:
            if not channel.flush():
                return
        except ChannelClosed:  # the read that follows finds the same
            pass
        self._selector.modify(channel, selectors.EVENT_READ)


def _exhausted(job: Job) -> Failure:
    return Failure(id=job.id, code="queue_full", detail=EXHAUSTED)

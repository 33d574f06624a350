"""The sockets of a worker, owned by its intake thread, which feeds the queue.

It never waits for the compute loop nor for a peer: an answer that a front end is slow to take stays
in that channel's outbox.
"""

from __future__ import annotations

import os
import selectors
import socket

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
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the lifeline ends. Any exception leaves a worker that hears nobody."""
        try:
            while not self._control.closed:
                self._turn()
        finally:
            for channel in (self._control, *self._fronts.values()):
                channel.close()
            self._selector.close()
            os.close(self._wake)

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

    def _turn(self) -> None:
        for key, events in self._selector.select():
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
            while not channel.closed and (got := channel.try_recv()) is not None:
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

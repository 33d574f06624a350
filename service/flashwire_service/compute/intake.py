"""The queue of a worker: bounded, fair between owners (lines.py), with the time it takes to drain.

The intake thread offers and cancels, the compute loop takes and finishes. Every method may be
called from either. Memory of dropped work is freed at once.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence

from flashwire_service.compute.lines import Lines, Load, Ticket
from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.frames import Failure

__all__ = ["Intake", "Ticket"]

_FIRST_GUESS_S = 0.1  # service time before any was measured
_WEIGHT = 0.2  # of the latest request in the mean service time
_SOONEST_S = 1.0  # Retry-After has whole seconds
_SPREAD = 0.5  # of Retry-After: who was refused together need not come back together


class Intake:
    """Jobs that wait, and those that run.

    max_requests, max_bytes   how many may wait, and the bytes of their bodies
    max_device_bytes          the device memory that they are estimated to need, one after the other
    chance                    a random number of [0, 1)
    watch                     is told what waits, on every change
    """

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        max_device_bytes: int = sys.maxsize,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        watch: Callable[[Load], None] = lambda load: None,
    ) -> None:
        self._limit = Load(max_requests, max_bytes, max_device_bytes)
        self._clock = clock
        self._chance = chance
        self._watch = watch
        self._changed = threading.Condition()
        self._lines = Lines(self._limit)
        self._mean_s = _FIRST_GUESS_S
        self._closed = False

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return self._lines.load.requests

    def offer(self, ticket: Ticket) -> Sequence[tuple[Ticket, Failure]]:
        """Queue a job. Returns who is refused for it and why: nobody, itself, or the newest jobs of
        owners who hold more of a full queue. Their memory is freed.
        """
        with self._changed:
            leaving = self._leaving(ticket)
            if leaving is None or leaving:
                self._drop(self._late)
                leaving = self._leaving(ticket)
            if leaving is None:
                ticket.free()
                return [(ticket, self._refusal(ticket))]
            refused = [(other, self._refusal(other)) for other in leaving]
            if leaving:
                self._drop(lambda waiting: waiting in leaving)
            self._lines.add(ticket)
            self._watch(self._lines.load)
            self._changed.notify()
            return refused

    def cancel(self, channel: Channel, job_id: int) -> None:
        """Drop a waiting job; a running one runs on, without anyone waiting for its answer."""
        self._abandon(lambda t: t.channel is channel and t.job.id == job_id)

    def drop_channel(self, channel: Channel) -> None:
        """Whoever asked over this channel is gone."""
        self._abandon(lambda t: t.channel is channel)

    def take(self, timeout: float) -> Ticket | None:
        """The next job that is still worth doing, or None after `timeout` seconds without one.

        Late jobs are dropped unstarted: their caller has been answered by the front end.
        """
        with self._changed:
            if not self.depth and not self._closed:
                self._changed.wait(timeout)
            while (ticket := self._lines.next()) is not None:
                self._watch(self._lines.load)
                if not self._late(ticket):
                    return ticket
                self._lines.finish(ticket, 0.0)
                ticket.free()
            return None

    def join(self, admits: Callable[[Ticket], bool]) -> list[Ticket]:
        """Waiting jobs, not late, to be computed together with the one just taken, if `admits` says
        so; in a fair order. Each of them, too, is taken until `finish`.
        """
        with self._changed:
            joined = self._lines.join(lambda ticket: not self._late(ticket) and admits(ticket))
            if joined:
                self._watch(self._lines.load)
            return joined

    def finish(self, ticket: Ticket, seconds: float) -> None:
        """A taken job has ended after this much work: free it."""
        ticket.free()
        with self._changed:
            self._lines.finish(ticket, seconds)
            self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def close(self) -> None:
        """Take what is there, but wait for nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def closed(self) -> bool:
        """Whether nothing more comes."""
        return self._closed

    @property
    def exhausted(self) -> bool:
        """Closed, and empty."""
        return self._closed and not self.depth

    def _late(self, ticket: Ticket) -> bool:
        return self._clock() >= ticket.job.deadline

    def _leaving(self, ticket: Ticket) -> list[Ticket] | None:
        """Who must leave for this one to be queued; None when it must not be."""
        if self._has_its_own(ticket):
            return None
        return self._lines.in_the_way(ticket)

    def _has_its_own(self, ticket: Ticket) -> bool:
        """Whether as many of its owner's wait as may."""
        most = ticket.job.max_queued
        return most is not None and self._lines.waiting_of(ticket.job.owner) >= most

    def _refusal(self, ticket: Ticket) -> Failure:
        waiting = self._lines.load
        if self._has_its_own(ticket):
            count = self._lines.waiting_of(ticket.job.owner)
            ahead = min(count * self._lines.owners, waiting.requests)
            detail = f"{count} requests of this key wait (its limit: {ticket.job.max_queued})"
        else:
            ahead = waiting.requests
            detail = (
                f"the queue is full: {waiting.requests} requests of {waiting.nbytes} bytes wait, "
                f"for about {waiting.memory} bytes of device memory (limits: "
                f"{self._limit.requests} requests, {self._limit.nbytes} bytes, "
                f"{self._limit.memory} of the device)"
            )
        drained_s = self._mean_s * (ahead + 1)  # with the one that runs
        retry_after = max(_SOONEST_S, drained_s * (1 + _SPREAD * self._chance()))
        return Failure(id=ticket.job.id, code="queue_full", detail=detail, retry_after=retry_after)

    def _abandon(self, which: Callable[[Ticket], bool]) -> None:
        with self._changed:
            self._drop(which)
            for running in self._lines.running:
                if which(running):
                    running.abandoned = True

    def _drop(self, which: Callable[[Ticket], bool]) -> None:
        """Free the waiting jobs of a kind. With the lock held."""
        for ticket in self._lines.remove(which):
            ticket.free()
        self._watch(self._lines.load)

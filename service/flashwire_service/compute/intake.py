"""The queue of a worker: bounded in requests and bytes, first come first served.

The intake thread offers and cancels, the compute loop takes and finishes. Every method may be
called from either. Memory of dropped work is freed at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.frames import Failure, Job
from flashwire_service.ipc.memory import Memory

_FIRST_GUESS_S = 0.1  # service time before any was measured
_WEIGHT = 0.2  # of the latest request in the mean service time


@dataclass(slots=True, eq=False)
class Ticket:
    """One job on its way through a worker. `channel` is where its answer goes."""

    job: Job
    channel: Channel
    memory: Memory | None = None
    abandoned: bool = False  # nobody waits for the answer

    @property
    def nbytes(self) -> int:
        return self.job.size

    def free(self) -> None:
        """Give up the request's memory."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class Intake:
    """Jobs that wait, and the one that runs."""

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._bytes = 0
        self._running: Ticket | None = None
        self._mean_s = _FIRST_GUESS_S
        self._closed = False

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    def offer(self, ticket: Ticket) -> Failure | None:
        """Queue a job, or free it and say why not."""
        with self._changed:
            if self._full_for(ticket):
                self._drop(self._late)
            if self._full_for(ticket):
                ticket.free()
                return self._refusal(ticket.job.id)
            self._waiting.append(ticket)
            self._bytes += ticket.nbytes
            self._changed.notify()
        return None

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
            if not self._waiting and not self._closed:
                self._changed.wait(timeout)
            while self._waiting:
                ticket = self._waiting.popleft()
                self._bytes -= ticket.nbytes
                if not self._late(ticket):
                    self._running = ticket
                    return ticket
                ticket.free()
            return None

    def finish(self, ticket: Ticket, seconds: float) -> None:
        """A taken job has ended after this much work: free it."""
        ticket.free()
        with self._changed:
            self._running = None
            self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def close(self) -> None:
        """Take what is there, but wait for nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def exhausted(self) -> bool:
        """Closed, and empty."""
        return self._closed and not self._waiting

    def _full_for(self, ticket: Ticket) -> bool:
        too_many = len(self._waiting) >= self._max_requests
        # A job on its own always fits, so that the limit cannot make one impossible.
        too_large = self._bytes + ticket.nbytes > self._max_bytes and bool(self._waiting)
        return too_many or too_large

    def _late(self, ticket: Ticket) -> bool:
        return self._clock() >= ticket.job.deadline

    def _refusal(self, job_id: int) -> Failure:
        waiting = len(self._waiting)
        return Failure(
            id=job_id,
            code="queue_full",
            detail=f"the queue is full: {waiting} requests of {self._bytes} bytes wait "
            f"(limits: {self._max_requests} requests, {self._max_bytes} bytes)",
            retry_after=self._mean_s * (waiting + 1),
        )

    def _abandon(self, which: Callable[[Ticket], bool]) -> None:
        with self._changed:
            self._drop(which)
            if self._running is not None and which(self._running):
                self._running.abandoned = True

    def _drop(self, which: Callable[[Ticket], bool]) -> None:
        """Free the waiting jobs of a kind. With the lock held."""
        kept: deque[Ticket] = deque()
        for ticket in self._waiting:
            if which(ticket):
                self._bytes -= ticket.nbytes
                ticket.free()
            else:
                kept.append(ticket)
        self._waiting = kept

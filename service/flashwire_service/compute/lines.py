"""Who waits for a worker, and whose turn it is: a line of jobs for each owner.

The owner whose jobs have had the least time of the worker so far is next; its own jobs are served
first come, first served. Time is charged as it was measured, not estimated: what a job costs
depends on the backend and the device, and nobody gains by making one look small. An owner who
comes back counts as having had as much as whoever was served last, so time not used is not saved
up. (Start-time fair queueing, Goyal, Vin and Cheng 1996, with one job at a time, or some together.)

Where there is no room, whoever holds most of the queue gives way to whoever holds less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.frames import Job
from flashwire_service.ipc.memory import Memory

NOT_ASKED = object()  # a kind of Ticket


class Load(NamedTuple):
    """What jobs take up, or may: how many, the bytes of their bodies, and the memory that computing
    them is estimated to need.
    """

    requests: int = 0
    nbytes: int = 0
    memory: int = 0

    def plus(self, other: Load) -> Load:
        return Load(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Load) -> Load:
        return Load(*(a - b for a, b in zip(self, other, strict=True)))

    def exceeds(self, limit: Load) -> bool:
        return any(a > b for a, b in zip(self, limit, strict=True))

    def share_of(self, limit: Load) -> float:
        """The largest part that it is of any of the limits."""
        return max(a / b for a, b in zip(self, limit, strict=True))


@dataclass(slots=True, eq=False)
class Ticket:
    """One job on its way through a worker. `channel` is where its answer goes."""

    job: Job
    channel: Channel
    memory: Memory | None = None
    abandoned: bool = False  # nobody waits for the answer
    kind: object = NOT_ASKED  # what batching.py has found out

    @property
    def body(self) -> memoryview | bytearray:
        """The request's message, writable; a copy where it came in the frame."""
        return self.memory.view if self.memory else bytearray(self.job.body or b"")

    @property
    def load(self) -> Load:
        return Load(1, self.job.size, self.job.device_bytes)

    def free(self) -> None:
        """Give up the request's memory."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None


@dataclass(slots=True)
class _Line:
    """The jobs of one owner. `used` is in seconds; `held` counts what runs, too."""

    used: float
    waiting: deque[tuple[int, Ticket]] = field(default_factory=deque)  # with a number to sort by
    held: Load = field(default_factory=Load)


class Lines:
    """Every owner's line, within one limit. Not for several threads at once."""

    def __init__(self, limit: Load) -> None:
        self._limit = limit
        self._lines: dict[str, _Line] = {}
        self._running: list[Ticket] = []
        self._now = 0.0  # what the owner served last had used then
        self._numbers = 0
        self.load = Load()  # of all that waits

    @property
    def running(self) -> Sequence[Ticket]:
        """What is computed now, together."""
        return self._running

    @property
    def owners(self) -> int:
        """How many have a job that waits."""
        return sum(bool(line.waiting) for line in self._lines.values())

    def waiting_of(self, owner: str) -> int:
        """How many jobs of this owner wait."""
        line = self._lines.get(owner)
        return len(line.waiting) if line else 0

    def in_the_way(self, ticket: Ticket) -> list[Ticket] | None:
        """The newest jobs of those who hold most, without which this one fits; None when its own
        owner would then hold as much as they. One on its own always fits: no limit can make a job
        impossible.
        """
        mine = self._held(ticket.job.owner).plus(ticket.load).share_of(self._limit)
        held = {owner: line.held for owner, line in self._lines.items()}
        left = {o: [t for _, t in line.waiting] for o, line in self._lines.items() if line.waiting}
        left.pop(ticket.job.owner, None)
        leaving: list[Ticket] = []
        load = self.load.plus(ticket.load)
        while left and load.requests > 1 and load.exceeds(self._limit):
            most = max(left, key=lambda owner: held[owner].share_of(self._limit))
            if mine >= held[most].share_of(self._limit):
                return None
            newest = left[most].pop()
            if not left[most]:
                del left[most]
            held[most] = held[most].minus(newest.load)
            load = load.minus(newest.load)
            leaving.append(newest)
        fits = load.requests == 1 or not load.exceeds(self._limit)
        return leaving if fits else None

    def add(self, ticket: Ticket) -> None:
        """At the end of its owner's line."""
        line = self._lines.setdefault(ticket.job.owner, _Line(self._now))
        if not line.held.requests:  # back, after having had nothing here
            line.used = max(line.used, self._now)
        self._numbers += 1
        line.waiting.append((self._numbers, ticket))
        line.held = line.held.plus(ticket.load)
        self.load = self.load.plus(ticket.load)

    def next(self) -> Ticket | None:
        """The job whose turn it is, which then runs until `finish`. None when none waits."""
        lines = [line for line in self._lines.values() if line.waiting]
        if not lines:
            return None
        line = min(lines, key=lambda line: (line.used, line.waiting[0][0]))
        self._now = max(self._now, line.used)
        return self._start(line, line.waiting[0])

    def join(self, admits: Callable[[Ticket], bool]) -> list[Ticket]:
        """Jobs that wait and may run together with the one that runs: of each owner the first that
        is admitted, whoever has had least first, then of each a second, and so on; the owner of the
        one that runs comes last. Each job is asked about once at most.
        """
        mine = {ticket.job.owner for ticket in self._running}
        lines = [(owner, line) for owner, line in self._lines.items() if line.waiting]
        lines.sort(key=lambda row: (row[0] in mine, row[1].used, row[1].waiting[0][0]))
        turns = deque((line, iter(tuple(line.waiting))) for _, line in lines)
        joined = []
        while turns:
            line, rest = turns.popleft()
            row = next((row for row in rest if admits(row[1])), None)
            if row is not None:
                joined.append(self._start(line, row))
                turns.append((line, rest))
        return joined

    def finish(self, ticket: Ticket, seconds: float) -> None:
        """A job that runs has ended, after so much time of the worker's."""
        self._running.remove(ticket)
        line = self._lines[ticket.job.owner]
        line.held = line.held.minus(ticket.load)
        line.used += seconds
        self._forget()

    def remove(self, which: Callable[[Ticket], bool]) -> list[Ticket]:
        """Take waiting jobs of a kind out, and return them."""
        removed = []
        for line in self._lines.values():
            for number, ticket in [row for row in line.waiting if which(row[1])]:
                line.waiting.remove((number, ticket))
                line.held = line.held.minus(ticket.load)
                self.load = self.load.minus(ticket.load)
                removed.append(ticket)
        self._forget()
        return removed

    def _start(self, line: _Line, row: tuple[int, Ticket]) -> Ticket:
        """A job waits no more: it runs."""
        line.waiting.remove(row)
        self.load = self.load.minus(row[1].load)
        self._running.append(row[1])
        return row[1]

    def _held(self, owner: str) -> Load:
        line = self._lines.get(owner)
        return line.held if line else Load()

    def _forget(self) -> None:
        """Owners of whom nothing is here and who have had no more than others."""
        if not self._running and not self.load.requests:
            self._lines.clear()
            return
        for owner, line in list(self._lines.items()):
            if not line.held.requests and line.used <= self._now:
                del self._lines[owner]

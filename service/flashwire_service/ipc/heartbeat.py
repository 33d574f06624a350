"""How a process shows that its loop turns: a few numbers on a shared page.

Only the loop writes them, so a side thread cannot vouch for it. Each is one aligned 8-byte store,
and their order is such that a reader between two stores never sees a worker older than it is. The
page outlives its process, and says what it was computing.
"""

from __future__ import annotations

import itertools
import time

from flashwire_service.ipc.memory import Memory

SIZE = 4096
IDLE_LIMIT_S = 2.0  # a worker idle and silent for longer is hung
BEAT_S = 0.5  # how often an idle loop beats; that of a front end always
MOST_JOBS = 64  # that are computed together


class Heartbeat:
    """The page, from either side. Times are CLOCK_MONOTONIC; zeros mean still starting."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._cells = memory.view[:16].cast("d")  # last beat, busy until
        self._jobs = memory.view[16 : 16 + 8 * MOST_JOBS].cast("Q")  # up to the first 0

    @classmethod
    def create(cls) -> Heartbeat:
        return cls(Memory.create(SIZE))

    @classmethod
    def receive(cls, fd: int) -> Heartbeat:
        return cls(Memory.receive(fd, SIZE, writable=True))

    def idle(self) -> None:
        """Written by the loop: ready, and waiting for work. A front end's loop is never busy."""
        self._cells[0] = time.monotonic()
        self._cells[1] = 0.0
        self._jobs[0] = 0

    def busy(self, until: float, *jobs: int) -> None:
        """Written by the loop: at work that may last until then, on the jobs of these ids if any;
        at most MOST_JOBS.
        """
        self._jobs[0] = 0
        for place, job in enumerate(jobs[1:], 1):
            self._jobs[place] = job
        if 0 < len(jobs) < MOST_JOBS:
            self._jobs[len(jobs)] = 0
        self._jobs[0] = jobs[0] if jobs else 0  # last: now readers see them all
        self._cells[1] = until
        self._cells[0] = time.monotonic()

    @property
    def started(self) -> bool:
        return bool(self._cells[0])

    @property
    def jobs(self) -> tuple[int, ...]:
        """The ids of what is being computed together, or was when the process ended."""
        return tuple(itertools.takewhile(bool, self._jobs))

    def complaint(self, now: float, idle_limit: float = IDLE_LIMIT_S) -> str | None:
        """Why the loop counts as hung, or None."""
        until, beat = self._cells[1], self._cells[0]
        if until:
            late = now - until
            return f"busy {late:.1f} s beyond its limit" if late > 0 else None
        silent = now - beat
        if beat and silent > idle_limit:
            return f"idle and silent for {silent:.1f} s"
        return None

    def close(self) -> None:
        self._cells.release()
        self._jobs.release()
        self.memory.close()

"""How a process shows that its loop turns: a few numbers on a shared page.

Only the loop writes them, so a side thread cannot vouch for it. Each is one aligned 8-byte store,
and their order is such that a reader between two stores never sees a worker older than it is. The
page outlives its process, and says what it was computing.
"""

from __future__ import annotations

import time

from flashwire_service.ipc.memory import Memory

SIZE = 4096
IDLE_LIMIT_S = 2.0  # a worker idle and silent for longer is hung
BEAT_S = 0.5  # how often an idle loop beats; that of a front end always


class Heartbeat:
    """The page, from either side. Times are CLOCK_MONOTONIC; zeros mean still starting."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._cells = memory.view[:16].cast("d")  # last beat, busy until
        self._job = memory.view[16:24].cast("Q")

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
        self._job[0] = 0

    def busy(self, until: float, job: int = 0) -> None:
        """Written by the loop: at work that may last until then, on the job of this id if any."""
        self._job[0] = job
        self._cells[1] = until
        self._cells[0] = time.monotonic()

    @property
    def started(self) -> bool:
        return bool(self._cells[0])

    @property
    def job(self) -> int:
        """The id of the job that is being computed, or was when the process ended; 0: none."""
        return self._job[0]

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
        self._job.release()
        self.memory.close()

"""How a worker shows that its compute loop turns: two numbers on a shared page.

Only the loop writes them, so a side thread cannot vouch for it. Each is one aligned 8-byte store,
and their order is such that a reader between two stores never sees a worker older than it is.
"""

from __future__ import annotations

import time

from flashwire_service.ipc.memory import Memory

SIZE = 4096
IDLE_LIMIT_S = 2.0  # idle and silent for longer is hung
BEAT_S = 0.5  # how often an idle loop beats


class Heartbeat:
    """The page, from either side. Times are CLOCK_MONOTONIC; zeros mean still starting."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._cells = memory.view[:16].cast("d")  # last beat, busy until

    @classmethod
    def create(cls) -> Heartbeat:
        return cls(Memory.create(SIZE))

    @classmethod
    def receive(cls, fd: int) -> Heartbeat:
        return cls(Memory.receive(fd, SIZE))

    def idle(self) -> None:
        """Written by the compute loop: ready, and waiting for work."""
        self._cells[0] = time.monotonic()
        self._cells[1] = 0.0

    def busy(self, until: float) -> None:
        """Written by the compute loop: at work that may last until then."""
        self._cells[1] = until
        self._cells[0] = time.monotonic()

    @property
    def started(self) -> bool:
        return bool(self._cells[0])

    def complaint(self, now: float) -> str | None:
        """Why the loop counts as hung, or None."""
        until, beat = self._cells[1], self._cells[0]
        if until:
            late = now - until
            return f"busy {late:.1f} s beyond its limit" if late > 0 else None
        silent = now - beat
        if beat and silent > IDLE_LIMIT_S:
            return f"idle and silent for {silent:.1f} s"
        return None

    def close(self) -> None:
        self._cells.release()
        self.memory.close()

"""Shared memory that bodies are received in, used again and again.

Fresh pages cost more than what is written into them: each is zeroed and mapped, fault by fault.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flashwire_service.ipc.memory import Memory

MOST = 64  # memories kept: each holds two descriptors
NAME = "flashwire-body"
_UNUSED_S = 60.0
_PAGE = 4096
_SPARE = 4  # what is used again holds at most so many times what is asked for


@dataclass(slots=True)
class _Free:
    memory: Memory
    since: float


class Buffers:
    """Keeps at most `limit` bytes, of MOST memories, for a minute. For one event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free: list[_Free] = []  # the one used last at the end
        self.kept_bytes = 0

    def take(self, size: int) -> Memory:
        """Memory of at least `size` bytes, with anything in it. `give_back` or close it.

        Raises OSError when the system has no descriptor or mapping to give.
        """
        fitting = [f for f in self._free if size <= f.memory.size <= _SPARE * size]
        if not fitting:
            return Memory.create(-(-size // _PAGE) * _PAGE, NAME)
        best = min(reversed(fitting), key=lambda free: free.memory.size)
        self._forget(best)
        return best.memory

    def give_back(self, memory: Memory) -> None:
        """Nobody reads or writes it any more."""
        if memory.size > self._limit:
            memory.close()
            return
        while self.kept_bytes + memory.size > self._limit or len(self._free) >= MOST:
            self._drop(self._free[0])
        self._free.append(_Free(memory, time.monotonic()))
        self.kept_bytes += memory.size

    def sweep(self) -> None:
        """Let go of what nobody used for a while."""
        oldest = time.monotonic() - _UNUSED_S
        while self._free and self._free[0].since < oldest:
            self._drop(self._free[0])

    def _drop(self, free: _Free) -> None:
        self._forget(free)
        free.memory.close()

    def _forget(self, free: _Free) -> None:
        self._free.remove(free)
        self.kept_bytes -= free.memory.size

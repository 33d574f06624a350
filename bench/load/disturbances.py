"""What is done to a service: its processes killed, stopped, and left without memory or descriptors.

Nothing in the service helps: signals and resource limits are what any machine may do to it.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from dataclasses import dataclass

from load import processes
from load.history import History, Kind
from load.service import Service

_STARVED_S = 1.5
_MEMORY_LEFT = 4 * 2**20  # of address space, as at the end of a leak
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
_NOTED: dict[str, Kind] = {
    "worker killed": "worker lost", "worker stopped": "worker lost",
    "front killed": "front lost", "front stopped": "front stopped",
}  # fmt: skip
# Of a round; each round in another order.
_KINDS = (
    "worker killed", "worker killed", "worker stopped", "front killed", "front stopped",
    "worker short of memory", "worker short of descriptors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Done:
    """A disturbance. `at` is in time.time(), as in the log, `clock` in time.monotonic()."""

    what: str
    pid: int
    at: float
    clock: float

    @property
    def deadly(self) -> bool:
        """Whether the process has to be replaced."""
        return self.what.split()[1] in _SIGNALS


class Disturbances:
    """One about every `every` seconds, on a process drawn from those that are there."""

    def __init__(self, service: Service, history: History, every: float, seed: int) -> None:
        self._service = service
        self._history = history
        self._every = every
        self._random = random.Random(seed)
        self.done: list[Done] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for what in self._random.sample(_KINDS, len(_KINDS)):
                await asyncio.sleep(self._every * self._random.uniform(0.5, 1.5))
                await self._do(what)

    async def _do(self, what: str) -> None:
        role, _, how = what.partition(" ")
        # One that is stopped while it starts may take as long as a start may: minutes.
        pids = (self._service.ready_pids if how == "stopped" else self._service.pids)(role)
        if not pids:
            return
        pid = self._random.choice(pids)
        if how == "short of memory":
            self._note("short of memory", what, pid)
            room = processes.address_space(pid) + _MEMORY_LEFT
            await _limited(pid, resource.RLIMIT_AS, room)
        elif how == "short of descriptors":
            self._note("short of descriptors", what, pid)
            await _limited(pid, resource.RLIMIT_NOFILE, 3)
        else:
            self._note(_NOTED[what], what, pid)
            os.kill(pid, _SIGNALS[how])

    def _note(self, kind: Kind, what: str, pid: int) -> None:
        self._history.note(kind)
        self.done.append(Done(what, pid, time.time(), time.monotonic()))


async def _limited(pid: int, which: int, most: int) -> None:
    """A lower limit for a while; its process may not live to see the end of it."""
    try:
        soft, hard = resource.prlimit(pid, which)
        resource.prlimit(pid, which, (most, hard))
        await asyncio.sleep(_STARVED_S)
        resource.prlimit(pid, which, (soft, hard))
    except ProcessLookupError:
        return

"""What is done to a service: its processes killed, stopped, and left without memory or descriptors.

Nothing in the service helps: signals and resource limits are what any machine may do to it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    "worker short of memory": "short of memory",
    "worker short of descriptors": "short of descriptors",
}  # fmt: skip
# Of the first round, in this order; what takes longest comes first.
_KINDS = (
    "front stopped", "worker killed", "worker stopped", "front killed", "worker short of memory",
    "worker short of descriptors",
)  # fmt: skip
_OFTEN = ("worker killed", "worker stopped")  # in further rounds twice, and all in another order
_GONE = (FileNotFoundError, ProcessLookupError)
_PATIENCE_S = 180.0  # for a process to be there


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
    """One about every `every` seconds, on a process drawn from those that are there.

    all_done   set once each kind has been done
    """

    def __init__(self, service: Service, history: History, every: float, seed: int) -> None:
        self._service = service
        self._history = history
        self._every = every
        self._random = random.Random(seed)
        self.done: list[Done] = []
        self.all_done = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        order = list(_KINDS)
        while True:
            for what in order:
                await asyncio.sleep(self._every * self._random.uniform(0.5, 1.5))
                while not await self._do(what, await self._victim(what)):
                    pass
            self.all_done.set()
            order = [*_KINDS, *_OFTEN]
            self._random.shuffle(order)

    async def _victim(self, what: str) -> int:
        """Raises TimeoutError when there is none for too long."""
        role, _, how = what.partition(" ")
        # One that is stopped while it starts may take as long as a start may: minutes.
        find = self._service.ready_pids if how == "stopped" else self._service.pids
        async with asyncio.timeout(_PATIENCE_S):
            while not (pids := find(role)):
                await asyncio.sleep(0.05)
        return self._random.choice(pids)

    async def _do(self, what: str, pid: int) -> bool:
        """False when the process has just ended by itself."""
        how = what.partition(" ")[2]
        done = Done(what, pid, time.time(), time.monotonic())
        self._history.note(_NOTED[what])
        try:
            if how == "short of memory":
                room = processes.address_space(pid) + _MEMORY_LEFT
                await _limited(pid, resource.RLIMIT_AS, room)
            elif how == "short of descriptors":
                await _limited(pid, resource.RLIMIT_NOFILE, 3)
            else:
                os.kill(pid, _SIGNALS[how])
        except _GONE:
            return False
        self.done.append(done)
        return True


async def _limited(pid: int, which: int, most: int) -> None:
    """A lower limit for a while; its process may not live to see the end of it."""
    soft, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (most, hard))
    await asyncio.sleep(_STARVED_S)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, which, (soft, hard))

"""Many users at once, who can be made to pause."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from load.traffic import Target, User

_PAUSE_LIMIT_S = 60.0  # for users to finish what they do


class Users:
    """`async with` starts them, paused, and ends them. What one of them raises is raised here."""

    def __init__(self, target: Target, count: int, pause_s: float) -> None:
        self._target = target
        self._users = [User(target, number, pause_s) for number in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Users:
        self._tasks = [asyncio.create_task(user.run()) for user in self._users]
        return self

    async def press(self, seconds: float) -> None:
        """Let them ask for so long, then pause."""
        self.go()
        await self.watch(seconds)
        await self.pause()

    async def cover(self, times: int) -> None:
        """All at once ask everything so often; only while they pause."""
        await asyncio.gather(*(user.cover(times) for user in self._users))
        await self.pause()

    def go(self) -> None:
        self._target.gate.set()

    def stop(self) -> None:
        """Nothing new is asked."""
        self._target.gate.clear()

    async def pause(self) -> None:
        """Until each has finished what it was doing and left its connection."""
        self.stop()
        end = time.monotonic() + _PAUSE_LIMIT_S
        while not all(user.idle for user in self._users):
            if time.monotonic() > end:
                raise TimeoutError("users do not come to an end")
            await self.watch(0.05)
        for user in self._users:
            user.leave()

    async def watch(self, seconds: float) -> None:
        """Wait so long; raises what one of them raises."""
        done, _ = await asyncio.wait(
            self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

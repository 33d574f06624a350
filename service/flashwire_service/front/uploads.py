"""The memory of bodies that are being received, all together within one limit.

Bytes count as they come, not as they are announced: otherwise a few announcements, sent slowly,
would keep everybody out. A body that announces more than is free is not begun; one that is under
way and finds no room is not read on, so that TCP holds its sender up. Either waits for a while and
is then refused. Those under way come first, and where all of them are stuck, the one that has
waited longest is refused first and makes room for the others.

Small bodies do not count: the number of connections bounds them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from flashwire_service.errors import Refusal
from flashwire_service.front.turns import Turns
from flashwire_service.ipc.channel import MAX_INLINE

PATIENCE_S = 10.0
_TURN_S = 0.1  # of PATIENCE_S: so long one that was refused has to make room for the next


@dataclass(slots=True)
class _Wait:
    nbytes: int  # that must be free
    taken: int  # of them, once they are
    granted: asyncio.Future[None]


class Uploads:
    """All bodies that one front end receives, `limit` bytes at most. For its event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way: deque[_Wait] = deque()
        self._to_begin: deque[_Wait] = deque()
        self._next_refusal = 0.0  # of one under way
        self.held_bytes = 0
        self.bodies = 0  # that are being received
        self.turns = Turns()

    def upload(self, owner: str = "") -> Upload:
        """A body that is about to come."""
        return Upload(self, owner)

    async def room(self, nbytes: int, taken: int, *, begun: bool) -> None:
        """Wait until so many bytes are free, and take some of them. Raises Refusal (queue_full)."""
        wait = _Wait(nbytes, taken, asyncio.get_running_loop().create_future())
        (self._under_way if begun else self._to_begin).append(wait)
        self._serve()
        if wait.granted.done():
            return
        try:
            granted = await self._granted(wait, begun)
        except asyncio.CancelledError:
            if not wait.granted.cancel():
                self.give_back(taken)  # it was granted in the very moment
            raise
        finally:
            self._serve()
        if not granted:
            raise Refusal("queue_full", self._refusal(nbytes))

    async def _granted(self, wait: _Wait, begun: bool) -> bool:
        """Whether there was room in time."""
        clock = asyncio.get_running_loop().time
        end = clock() + PATIENCE_S
        while True:
            await asyncio.wait({wait.granted}, timeout=end - clock())
            if wait.granted.done():
                return True
            if not begun or clock() >= self._next_refusal:
                break
            end = self._next_refusal
        if begun:
            self._next_refusal = clock() + _TURN_S * PATIENCE_S
        wait.granted.cancel()
        return False

    def give_back(self, nbytes: int) -> None:
        """So many bytes are free again."""
        self.held_bytes -= nbytes
        self._serve()

    def _serve(self) -> None:
        for queue in (self._under_way, self._to_begin):
            while queue and (queue[0].granted.done() or self._fits(queue[0].nbytes)):
                wait = queue.popleft()
                if not wait.granted.done():
                    self.held_bytes += wait.taken
                    wait.granted.set_result(None)
            if queue:
                return

    def _fits(self, nbytes: int) -> bool:
        return self.held_bytes + nbytes <= self._limit

    def _refusal(self, nbytes: int) -> str:
        return (
            f"uploads hold {self.held_bytes} of {self._limit} bytes, and there was no room for "
            f"{nbytes} more within {PATIENCE_S:g} s"
        )


class Upload:
    """One body. Its bytes are free again when the `with` ends."""

    def __init__(self, uploads: Uploads, owner: str) -> None:
        self._uploads = uploads
        self._owner = owner
        self._held = 0

    async def begin(self, announced: int | None) -> None:
        """Before the first byte, of so many or nobody knows how many. Raises Refusal."""
        if announced is not None and announced > MAX_INLINE:
            await self._uploads.room(announced, 0, begun=False)

    async def grow(self, size: int) -> None:
        """So many bytes have come in all. Raises Refusal."""
        more = size - self._held
        if size > MAX_INLINE and more:
            await self._uploads.room(more, more, begun=True)
            self._held = size

    def most(self) -> int:
        """Bytes that may be read of it before the next `turn`."""
        return self._uploads.turns.most

    async def turn(self, nbytes: int) -> None:
        """Wait until its owner may go on, after so many bytes more."""
        await self._uploads.turns.turn(self._owner, nbytes)

    def __enter__(self) -> Upload:
        self._uploads.turns.enter(self._owner)
        self._uploads.bodies += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        self._uploads.turns.leave(self._owner)
        self._uploads.bodies -= 1
        self._uploads.give_back(self._held)
        self._held = 0

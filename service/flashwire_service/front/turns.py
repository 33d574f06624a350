"""Whose body is received next, where several come at once.

Receiving is work for the one thread of a front end. Left alone it reads whatever has come, so an
owner with thirty connections would get thirty times what one with a single connection gets. Here
each piece of a body asks for its turn before the next is read: the owner with the fewest bytes so
far is next. Who waits is not read on, and TCP holds the sender up. Between two pieces the event
loop comes to everything else, replies included: so they are small, and one a turn of the loop,
whosever they are. A body that comes alone does not wait, and its pieces are large.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

# The next piece of who was just served may come within so many turns of the event loop, if it comes
# at once; a sender who was served longer ago than that is slow.
_LOOKS = 8
_JUST_S = 0.02
_ALONE, _AMONG_OTHERS = 4 * 2**20, 2**19  # bytes of a piece


@dataclass(slots=True)
class _Sender:
    used: int  # bytes
    bodies: int = 0  # that are being received
    served: float = 0.0  # when last
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class Turns:
    """The owners who send to one front end. For its event loop only."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}
        self._now = 0  # bytes that the owner served last had had then
        self._looks = 0
        self._armed = False

    def enter(self, owner: str) -> None:
        """A body of this owner begins. `leave` when it has ended."""
        sender = self._senders.setdefault(owner, _Sender(self._now))
        if not sender.bodies:  # what was not sent is not saved up
            sender.used = max(sender.used, self._now)
        sender.bodies += 1

    def leave(self, owner: str) -> None:
        """A body of this owner has ended, one way or the other."""
        sender = self._senders[owner]
        sender.bodies -= 1
        if not any(s.bodies for s in self._senders.values()):
            self._senders.clear()
        elif not sender.bodies and sender.used <= self._now:
            del self._senders[owner]

    @property
    def most(self) -> int:
        """Bytes that the next piece of a body may have."""
        return _ALONE if self._alone else _AMONG_OTHERS

    @property
    def _alone(self) -> bool:
        """Whether there is one body at most."""
        return sum(sender.bodies for sender in self._senders.values()) <= 1

    async def turn(self, owner: str, nbytes: int) -> None:
        """Wait until this owner may go on, after so many bytes more."""
        sender = self._senders[owner]
        if self._alone:
            sender.used += nbytes
            self._now = max(self._now, sender.used)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sender.waiting.append((nbytes, future))
        self._arm()
        await future

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Let one piece pass in this turn of the loop, or nothing while the next piece of who comes
        first is about to arrive.
        """
        self._armed = False
        for sender in self._senders.values():
            while sender.waiting and sender.waiting[0][1].cancelled():
                sender.waiting.popleft()
        waiting = [sender for sender in self._senders.values() if sender.waiting]
        if not waiting:
            return
        now = asyncio.get_running_loop().time()
        chosen = min(waiting, key=lambda sender: sender.used)
        if self._looks < _LOOKS and self._another_comes(chosen, now):
            self._looks += 1
        else:
            self._looks = 0
            nbytes, future = chosen.waiting.popleft()
            self._now = max(self._now, chosen.used)
            chosen.used += nbytes
            chosen.served = now
            future.set_result(None)
        self._arm()

    def _another_comes(self, chosen: _Sender, now: float) -> bool:
        return any(
            s.bodies and not s.waiting and s.used < chosen.used and now - s.served < _JUST_S
            for s in self._senders.values()
        )

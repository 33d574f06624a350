"""Which connections there are, who may have one, and who waits for one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from flashwire.transport.connection import Connection

Origin = tuple[str, str, int]  # scheme, host, port


class Event(Protocol):
    """threading.Event, or asyncio's."""

    def set(self) -> None: ...


@dataclass(eq=False)
class Turn:
    """Somebody's turn to have a connection to `origin`. `event` is set once it has come; then
    `connection` is a kept one, or None: a new one may be opened.
    """

    origin: Origin
    event: Event
    granted: bool = False
    connection: Connection | None = field(default=None)


class Pool:
    """At most `limits.max_connections`, used or kept. For any number of threads.

    A connection that is taken is either kept or dropped in the end; so is the right to open one.
    """

    def __init__(self, limits: httpx.Limits, event: Callable[[], Event]) -> None:
        self._limits = limits
        self._event = event
        self._lock = threading.Lock()
        self._count = 0
        self._idle: list[Connection] = []  # the one used last at the end
        self._turns: deque[Turn] = deque()
        self._closed = False

    def take(self, origin: Origin) -> Turn:
        """A turn: granted, or to be waited for."""
        turn = Turn(origin, self._event())
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            self._grant(turn)
            if not turn.granted:
                self._turns.append(turn)
        return turn

    def give_up(self, turn: Turn) -> None:
        """Wait no more; what has been granted meanwhile goes to the next."""
        with self._lock:
            if not turn.granted:
                self._turns.remove(turn)
                return
        if turn.connection is not None:
            self.keep(turn.connection)
        else:
            self.drop(None)

    def keep(self, connection: Connection) -> None:
        """It can be used again."""
        expiry = self._limits.keepalive_expiry
        connection.expires = None if expiry is None else time.monotonic() + expiry
        with self._lock:
            self._idle.append(connection)
            self._trim()
            self._serve()

    def drop(self, connection: Connection | None) -> None:
        """It is closed, or was never opened."""
        if connection is not None:
            connection.close()
        with self._lock:
            self._count -= 1
            self._serve()

    def close(self) -> None:
        """Close what is kept. What is in use is closed by whoever uses it."""
        with self._lock:
            self._closed = True
            self._trim()

    def _serve(self) -> None:
        """Whoever has waited longest."""
        while self._turns:
            self._grant(self._turns[0])
            if not self._turns[0].granted:
                return
            self._turns.popleft().event.set()

    def _grant(self, turn: Turn) -> None:
        now = time.monotonic()
        for connection in reversed(self._idle):
            if connection.origin != turn.origin:
                continue
            self._idle.remove(connection)
            if not connection.stale and (connection.expires is None or now <= connection.expires):
                turn.connection, turn.granted = connection, True
                return
            self._discard(connection)
        most = self._limits.max_connections
        if most is not None and self._count >= most and self._idle:
            self._discard(self._idle.pop(0))  # another origin's
        if most is None or self._count < most:
            self._count += 1
            turn.granted = True

    def _trim(self) -> None:
        kept = self._limits.max_keepalive_connections
        most = 0 if self._closed else len(self._idle) if kept is None else kept
        while len(self._idle) > most:
            self._discard(self._idle.pop(0))

    def _discard(self, connection: Connection) -> None:
        connection.close()
        self._count -= 1

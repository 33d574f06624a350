"""Callers who ask without pause, as cheaply as can be.

What they take of the processor is taken from the service they press. So all of them are one thread,
their request lies in memory that the kernel sends from without a copy, and of what comes back only
the heads are read: the kernel throws the bodies away.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from multiprocessing.synchronize import Event

_MOST_SENT = 2**20  # in one call
_MOST_READ = 2**20
_HEAD_END = b"\r\n\r\n"
_PAUSE_S = 0.02  # after a refusal
_SETTLED = 2  # replies to each, until it is a steady flood


def flood(ready: Event, host: str, port: int, count: int, whole: bytes) -> None:
    """`count` connections ask `whole`, again and again, until this process is killed. `ready` is
    set once it goes on steadily.
    """
    body = os.memfd_create("flood")
    os.write(body, whole)
    selector = selectors.DefaultSelector()
    callers = [_Caller((host, port), body, len(whole)) for _ in range(count)]
    for caller in callers:
        selector.register(caller.socket, selectors.EVENT_WRITE, caller)
    resting: list[tuple[float, _Caller]] = []
    while True:
        for key, _ in selector.select(_PAUSE_S if resting else None):
            caller = key.data
            wanted = caller.go_on()
            if wanted is None:
                selector.unregister(caller.socket)
                resting.append((time.monotonic() + _PAUSE_S, caller))
            elif wanted != key.events:
                selector.modify(caller.socket, wanted, caller)
        while resting and resting[0][0] <= time.monotonic():
            caller = resting.pop(0)[1]
            selector.register(caller.socket, selectors.EVENT_WRITE, caller)
        if not ready.is_set() and all(caller.answered >= _SETTLED for caller in callers):
            ready.set()


class _Caller:
    """One connection: sending, or reading, and so on."""

    _scratch = memoryview(bytearray(_MOST_READ))

    def __init__(self, address: tuple[str, int], body: int, size: int) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setblocking(False)
        self.answered = 0
        self._body, self._size = body, size
        self._sent = 0
        self._head = b""
        self._left: int | None = None  # of the body that comes; None: the head is not yet read

    def go_on(self) -> int | None:
        """A step. What to wait for then; None: a pause."""
        if self._sent < self._size:
            most = min(_MOST_SENT, self._size - self._sent)
            self._sent += os.sendfile(self.socket.fileno(), self._body, self._sent, most)
            return selectors.EVENT_READ if self._sent == self._size else selectors.EVENT_WRITE
        if self._left is None:
            self._read_head()
        else:
            self._left -= self._taken(min(self._left, _MOST_READ), socket.MSG_TRUNC)
        if self._left != 0:
            return selectors.EVENT_READ
        refused = self._head.split(b" ", 2)[1] != b"200"
        self._sent, self._head, self._left = 0, b"", None
        self.answered += 1
        return None if refused else selectors.EVENT_WRITE

    def _read_head(self) -> None:
        self._head += self._scratch[: self._taken(2**13)]
        head, end, begun = self._head.partition(_HEAD_END)
        if end:
            names = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
            self._left = int(names[b"content-length"]) - len(begun)

    def _taken(self, most: int, flags: int = 0) -> int:
        count = self.socket.recv_into(self._scratch, most, flags)
        if not count:
            raise ConnectionError("the service has closed a connection of the flood")
        return count

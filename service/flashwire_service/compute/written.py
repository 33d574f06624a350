"""Memory that large replies are written in, used again and again.

A front end has it until it has sent the reply, and says so; until then it is lent. What is never
said to be free is forgotten in time, and dies with its last descriptor. Fresh memory is for replies
that a caller keeps where they are: no byte of an earlier one may lie behind them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from flashwire_service.ipc.buffers import Buffers
from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.memory import Memory


class Written:
    """Keeps at most `limit` bytes, and as many lent. From any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._free = Buffers(limit)
        self._lent: OrderedDict[tuple[Channel, int], Memory] = OrderedDict()
        self._lent_bytes = 0

    def take(self, size: int) -> Memory:
        """Memory of at least so many bytes, with anything in it. Raises OSError."""
        with self._lock:
            return self._free.take(size)

    def give_back(self, memory: Memory) -> None:
        """It was never lent."""
        with self._lock:
            self._free.give_back(memory)

    def lend(self, channel: Channel, job: int, memory: Memory) -> None:
        """It goes to a front end, with the reply to a job."""
        try:
            memory.view  # noqa: B018  # is mapped, so that it can be written to again
        except OSError:
            memory.close()
            return
        with self._lock:
            self._lent[channel, job] = memory
            self._lent_bytes += memory.size
            while self._lent_bytes > self._limit:
                self._take_back(next(iter(self._lent))).close()

    def returned(self, channel: Channel, job: int) -> None:
        """The front end is done with it; or never had any."""
        with self._lock:
            if (channel, job) in self._lent:
                self._free.give_back(self._take_back((channel, job)))

    def lose(self, channel: Channel) -> None:
        """That front end is gone."""
        with self._lock:
            for key in [key for key in self._lent if key[0] is channel]:
                self._take_back(key).close()

    def sweep(self) -> None:
        """Let go of what nobody used for a while."""
        with self._lock:
            self._free.sweep()

    def _take_back(self, key: tuple[Channel, int]) -> Memory:
        memory = self._lent.pop(key)
        self._lent_bytes -= memory.size
        return memory

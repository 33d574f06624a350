"""How soon a service is itself again after a disturbance."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from load import tiny
from load.connection import Connection, Lost
from load.disturbances import Done

_EVERY_S = 0.2
_PATIENCE_S = 20.0
_SEEDS = 2**40  # beyond those of users


class Probes:
    """A tiny request over a new connection, again and again: since when is there an answer?"""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._answered: list[tuple[float, float]] = []  # sent, answered rightly
        self._seeds = itertools.count(_SEEDS)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as probes:
            while True:
                probes.create_task(self._probe())
                await asyncio.sleep(_EVERY_S)

    async def _probe(self) -> None:
        request, out = tiny.build(next(self._seeds))
        sent = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                connection = await Connection.open(*self._address)
                try:
                    await connection.send(request.whole())
                    reply = await connection.reply()
                finally:
                    connection.abort()
        except (Lost, TimeoutError):
            return
        if reply.status == 200 and tiny.out_of(reply) == out:
            self._answered.append((sent, time.monotonic()))

    def answering_after(self, done: Done) -> float | None:
        """Seconds from a disturbance to the first answer to a request sent after it."""
        answered = [at for sent, at in self._answered if sent >= done.clock]
        return min(answered) - done.clock if answered else None


def replaced_after(done: Done, events: list[dict[str, Any]]) -> float | None:
    """Seconds from the end of a process to the readiness of its successor, as the log has it."""
    names = [e["child"] for e in events if e["event"] == "started" and e["pid"] == done.pid]
    for event in events:
        if (
            event["event"] == "ready"
            and event["child"] in names
            and event["at"] > done.at
            and event["pid"] != done.pid
        ):
            return float(event["at"] - done.at)
    return None

"""One caller's latencies, and others who press at the same time from a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from flashwire import operations, wire
from load.connection import MSGPACK, Request
from load.machine import Watch
from load.tally import quantile

NICENESS = 10
QUIET = 0.05  # of the machine that others may use, for a round to count
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one exchange, in seconds: all of it, and what the worker says of its part."""

    whole: float
    queue: float
    compute: float

    @property
    def rest(self) -> float:
        """The bytes' way there and back, and all that is neither waiting nor computing."""
        return self.whole - self.queue - self.compute


@dataclass(frozen=True, slots=True)
class Round:
    """Latencies, and what part of the machine others used meanwhile."""

    foreign: float
    found: list[Latency]


Shape = tuple[int, ...]


def attention(q: Shape, k: Shape, v: Shape, key: str | None = None) -> Request:
    """A float32 attention of that size."""
    rng = np.random.default_rng(0)
    operation = operations.attention(*(rng.random(shape, np.float32) for shape in (q, k, v)))
    headers = {"content-type": MSGPACK} | ({"authorization": f"Bearer {key}"} if key else {})
    return Request(headers=headers, body=b"".join(operation.body))


def latencies(host: str, port: int, request: Request, times: int, pause: float) -> Round:
    """Of so many exchanges, one after the other, over one connection.

    Raises RuntimeError for a reply that is not good.
    """
    found = []
    whole = request.whole()
    with socket.create_connection((host, port), 60) as connection, Watch() as watch:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as HTTP clients do
        for _ in range(times):
            time.sleep(pause)
            began = time.perf_counter()
            connection.sendall(whole)
            reply = HTTPResponse(connection)
            reply.begin()
            body = reply.read()
            took = time.perf_counter() - began
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {body[:300]!r}")
            said = wire.decode(body, wire.REPLY).options["meta"]["timings_ms"]
            found.append(Latency(took, said["queue"] / 1000, said["compute"] / 1000))
    return Round(watch.foreign, found)


def quiet_rounds(
    measures: Sequence[Callable[[], Round]], rounds: int, patience: float
) -> list[Round]:
    """For each measure so many rounds, as one: those during which others used least of the machine.

    Measures are taken in turn, `rounds` times, and on for up to `patience` s while others use more
    than QUIET in too many.
    """
    made: list[list[Round]] = [[] for _ in measures]
    end = time.monotonic() + patience
    while True:
        for measure, known in zip(measures, made, strict=True):
            known.append(measure())
            known.sort(key=lambda one: one.foreign)
        best = [known[:rounds] for known in made]
        quiet = all(one.foreign <= QUIET for chosen in best for one in chosen)
        if len(best[0]) == rounds and (quiet or time.monotonic() > end):
            break
    return [
        Round(chosen[-1].foreign, [latency for one in chosen for latency in one.found])
        for chosen in best
    ]


def told(round_: Round) -> str:
    """Percentiles, and medians of the parts, in milliseconds."""
    found = round_.found
    whole = [latency.whole for latency in found]
    p50, p95 = 1000 * statistics.median(whole), 1000 * quantile(whole, 0.95)
    parts = ", ".join(
        f"{1000 * statistics.median(getattr(latency, part) for latency in found):.1f} {name}"
        for part, name in (("queue", "queued"), ("compute", "computing"), ("rest", "the rest"))
    )
    others = f"others used up to {100 * round_.foreign:.0f} % of the machine"
    return f"p50 {p50:.1f} ms, p95 {p95:.1f} ms ({parts}; {others})"


class Others:
    """`work(ready, *arguments)` runs in another process while `with` lasts, once `ready` is set."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready = context.Event()
        self._process = context.Process(target=_run, args=(work, self._ready, *arguments))

    def __enter__(self) -> Others:
        self._process.start()
        end = time.monotonic() + _START_S
        while not self._ready.wait(0.1):
            if time.monotonic() > end or not self._process.is_alive():
                self._process.kill()
                raise RuntimeError("the others do not come")
        return self

    def __exit__(self, *_: object) -> None:
        ended = self._process.exitcode
        self._process.kill()
        self._process.join()
        if ended is not None:
            raise RuntimeError(f"the others have ended by themselves: exit status {ended}")


def _run(work: Callable[..., None], ready: Event, *arguments: Any) -> None:
    os.nice(NICENESS)
    work(ready, *arguments)

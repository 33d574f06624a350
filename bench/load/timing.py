"""One caller's latencies, and others who press at the same time from a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPResponse
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from flashwire import operations, wire
from load.connection import MSGPACK, Request
from load.tally import quantile

NICENESS = 10
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


def attention(heads: int, length: int, dim: int, key: str | None = None) -> Request:
    """A float32 self-attention of that size."""
    x = np.random.default_rng(0).random((1, heads, length, dim), np.float32)
    operation = operations.attention(x, x, x)
    headers = {"content-type": MSGPACK} | ({"authorization": f"Bearer {key}"} if key else {})
    return Request(headers=headers, body=b"".join(operation.body))


def latencies(host: str, port: int, request: Request, times: int, pause: float) -> list[Latency]:
    """Of so many exchanges, one after the other, over one connection.

    Raises RuntimeError for a reply that is not good.
    """
    found = []
    whole = request.whole()
    with socket.create_connection((host, port), 60) as connection:
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
    return found


def told(found: list[Latency]) -> str:
    """Their percentiles, and the medians of their parts, in milliseconds."""
    whole = [latency.whole for latency in found]
    p50, p95 = 1000 * statistics.median(whole), 1000 * quantile(whole, 0.95)
    parts = ", ".join(
        f"{1000 * statistics.median(getattr(latency, part) for latency in found):.1f} {name}"
        for part, name in (("queue", "queued"), ("compute", "computing"), ("rest", "the rest"))
    )
    return f"p50 {p50:.1f} ms, p95 {p95:.1f} ms ({parts})"


class Others:
    """`work(ready, *arguments)` runs in another process while `with` lasts, once `ready` is set."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready = context.Event()
        self._process = context.Process(target=_run, args=(work, self._ready, *arguments))

    def __enter__(self) -> Others:
        self._process.start()
        if not self._ready.wait(_START_S):
            self._process.kill()
            raise TimeoutError("the others do not come")
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

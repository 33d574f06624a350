"""One caller's latencies, and others who press at the same time from a process of their own."""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from flashwire import operations
from load.connection import MSGPACK, Request

NICENESS = 10
_START_S = 60.0


def attention(heads: int, length: int, dim: int, key: str | None = None) -> Request:
    """A float32 self-attention of that size."""
    x = np.random.default_rng(0).random((1, heads, length, dim), np.float32)
    operation = operations.attention(x, x, x)
    headers = {"content-type": MSGPACK} | ({"authorization": f"Bearer {key}"} if key else {})
    return Request(headers=headers, body=b"".join(operation.body))


def latencies(host: str, port: int, request: Request, times: int, pause: float) -> list[float]:
    """Seconds of each of so many exchanges, one after the other, over one connection.

    Raises RuntimeError for a reply that is not good.
    """
    found = []
    connection = http.client.HTTPConnection(host, port, timeout=60)
    for _ in range(times):
        time.sleep(pause)
        began = time.perf_counter()
        connection.request(request.method, request.path, request.body, dict(request.headers))
        reply = connection.getresponse()
        body = reply.read()
        found.append(time.perf_counter() - began)
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {body[:300]!r}")
    connection.close()
    return found


class Others:
    """`work(ready, *arguments)` runs in another process while `with` lasts, once `ready` is set."""

    def __init__(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
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
        self._process.kill()
        self._process.join()


def _run(work: Callable[..., Coroutine[Any, Any, None]], ready: Event, *arguments: Any) -> None:
    os.nice(NICENESS)
    asyncio.run(work(ready, *arguments))

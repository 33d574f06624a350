"""A server with a side door, for tests of callers that share memory with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from local_caller import Caller

from flashwire import Client, wire
from flashwire.local.transport import SharedTransport

KEY = "first-key"
FLAGS = (
    "--max-body-bytes", "32MiB", "--shared-memory-bytes", "96MiB", "--max-connections", "16",
)  # fmt: skip
_RNG = np.random.default_rng(5)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return _RNG.standard_normal(shape).astype(dtype)


def body(options: dict[str, Any], **tensors: Any) -> bytes:
    ready = {
        name.replace("__", "."): (
            wire.Header(str(a.dtype), a.shape),
            memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8)),
        )
        for name, a in tensors.items()
    }
    return wire.encode(options, ready)


class Shared:
    """A server with a side door, and ways to it."""

    def __init__(self, server: Any, path: str) -> None:
        self.server = server
        self.path = path
        self._callers: list[Caller] = []

    def http(self) -> httpx.Client:
        transport = SharedTransport(self.path, httpx.HTTPTransport(uds=self.path))
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.Client(transport=transport, base_url="http://localhost", headers=headers)

    def client(self, **options: Any) -> Client:
        return Client(f"unix://{self.path}", api_key=KEY, shared_memory=True, **options)

    def caller(self) -> Caller:
        """A new one; `end_callers` sees to its end."""
        self._callers.append(caller := Caller(self.path, KEY))
        return caller

    def end_callers(self) -> None:
        """All of them, and the server has seen it."""
        for caller in self._callers:
            caller.close()
        self._callers.clear()
        eventually(lambda: self.metric("flashwire_local_connections") == 0)

    def lines(self, event: str) -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in self.server.log.splitlines() if line[:1] == "{"]
        return [line for line in parsed if line["event"] == event]

    def metric(self, name: str) -> float:
        text = self.server.http.get("/metrics").text
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
        )

    @property
    def pids(self) -> list[int]:
        started = [line for line in self.lines("started") if line["child"] == "front-0"]
        return [started[-1]["pid"], *self.server.worker_pids()]


def eventually(met: Callable[[], bool]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 15
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)

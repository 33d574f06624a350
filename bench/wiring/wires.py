"""Each way to carry a case: a call, after which the reply is in the caller's hands."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from typing import Any, Protocol

import httpx
import msgpack
import numpy as np

from flashwire import Client
from wiring import raw
from wiring.cases import Array, Case

RAW_TCP, RAW_UNIX, MEMCPY = "raw TCP", "raw unix socket", "memcpy"
PLAIN, PLAIN_HTTPX = "plain service", "plain service, by httpx"
TCP, UNIX, SHARED = "flashwire, TCP", "flashwire, unix socket", "flashwire, shared memory"
BARE = (MEMCPY, RAW_TCP, RAW_UNIX)
SERVICES = (PLAIN, PLAIN_HTTPX, TCP, UNIX, SHARED)


class Wire(Protocol):
    """A connection, or what stands for one."""

    def carry(self, case: Case, tensors: tuple[Array, Array, Array]) -> float:
        """One exchange. Seconds that computing took of it, as far as the other side tells."""

    def close(self) -> None: ...


class Memcpy:
    """Both ways, from warm memory to warm memory."""

    def __init__(self) -> None:
        self._from = np.ones(2**26 + 2**22, np.uint8)
        self._to = np.ones_like(self._from)

    def carry(self, case: Case, _: tuple[Array, Array, Array]) -> float:
        self._copy(case.up)
        self._copy(case.down)
        return 0.0

    def _copy(self, nbytes: int) -> None:
        self._to[:nbytes] = self._from[:nbytes]

    def close(self) -> None:
        pass


class Raw:
    """A bare socket, to a port of this machine or to a path."""

    def __init__(self, address: int | str) -> None:
        self._caller = raw.Caller(address)

    def carry(self, case: Case, _: tuple[Array, Array, Array]) -> float:
        self._caller.exchange(case.up, case.down)
        return 0.0

    def close(self) -> None:
        self._caller.close()


class Plain:
    """The plain service, by http.client: faster than httpx, and for large bodies by far."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port)

    def carry(self, case: Case, tensors: tuple[Array, Array, Array]) -> float:
        message = {name: _packed(x) for name, x in zip("qkv", tensors, strict=True)}
        answer = msgpack.unpackb(self._reply(msgpack.packb(message)))
        out = answer["out"]
        _check(np.frombuffer(out["data"], np.float32).reshape(out["shape"]), case)
        return float(answer["meta"]["compute_ms"]) / 1e3

    def _reply(self, message: bytes) -> bytes:
        self._http.request("POST", "/attention", message)
        reply = self._http.getresponse()
        body = reply.read()
        if reply.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{reply.status}: {body[:200]!r}")
        return body

    def close(self) -> None:
        self._http.close()


class PlainHttpx(Plain):
    """The same by httpx, as most would write it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/attention"
        self._client = httpx.Client(timeout=60, trust_env=False)

    def _reply(self, message: bytes) -> bytes:
        reply = self._client.post(self._url, content=message)
        reply.raise_for_status()
        return reply.content

    def close(self) -> None:
        self._client.close()


class Flashwire:
    """flashwire's own client."""

    def __init__(self, url: str, shared_memory: bool = False) -> None:
        self._client = Client(url, retries=0, shared_memory=shared_memory)

    def carry(self, case: Case, tensors: tuple[Array, Array, Array]) -> float:
        result = self._client.attention(*tensors)
        _check(result.out, case)
        return float(result.meta["timings_ms"]["compute"]) / 1e3

    def close(self) -> None:
        self._client.close()


MAKERS: dict[str, Callable[..., Wire]] = {
    MEMCPY: Memcpy, RAW_TCP: Raw, RAW_UNIX: Raw, PLAIN: Plain,
    PLAIN_HTTPX: PlainHttpx, TCP: Flashwire, UNIX: Flashwire,
    SHARED: Flashwire,
}  # fmt: skip


def timed(wire: Wire, case: Case, tensors: tuple[Array, Array, Array]) -> tuple[float, float]:
    """(seconds of one exchange, those that computing took of it)."""
    start = time.perf_counter()
    computing = wire.carry(case, tensors)
    return time.perf_counter() - start, computing


def _packed(x: Array) -> dict[str, Any]:
    return {"dtype": "float32", "shape": x.shape, "data": x.tobytes()}


def _check(out: Array, case: Case) -> None:
    if out.shape != case.q:
        raise RuntimeError(f"a reply of shape {out.shape}, not {case.q}")

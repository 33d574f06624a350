"""Requests that must be refused, and how: (status, code)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from load.connection import JSON, MSGPACK, Request

Refused = tuple[int, str]
MALFORMED, INVALID = (400, "malformed"), (422, "invalid")
_NEVER = "/attention/residual/"


@dataclass(frozen=True, slots=True)
class Bad:
    """`pieces` are sent one after the other; `by_worker`: a worker has to look at its values."""

    pieces: tuple[bytes, ...]
    expected: Refused
    by_worker: bool = False


def draw(r: random.Random, max_body: int) -> Bad:
    """One of them. `max_body` is the server's limit."""
    return r.choice(_MAKERS)(r, max_body)


def _tensor(r: random.Random, *shape: int, **changes: Any) -> dict[str, Any]:
    data = np.random.default_rng(r.getrandbits(64)).random(shape, np.float32).tobytes()
    return {"dtype": "float32", "shape": list(shape), "data": data} | changes


def _message(r: random.Random, **changes: Any) -> dict[str, Any]:
    return {name: _tensor(r, 3, 4) for name in "qkv"} | changes


def _posted(body: bytes, kind: str = MSGPACK, path: str = "/attention", **headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(path=path, headers={"content-type": kind} | named, body=body)


def _bad(request: Request, expected: Refused, *, by_worker: bool = False) -> Bad:
    return Bad((request.whole(),), expected, by_worker)


def _of_message(expected: Refused, by_worker: bool = False, **changes: Any) -> Maker:
    def make(r: random.Random, _: int) -> Bad:
        body = msgpack.packb(_message(r, **changes))
        return _bad(_posted(body), expected, by_worker=by_worker)

    return make


def _truncated(r: random.Random, _: int) -> Bad:
    body = msgpack.packb(_message(r))
    return _bad(_posted(body[: r.randrange(len(body))]), MALFORMED)


def _trailing(r: random.Random, _: int) -> Bad:
    return _bad(_posted(msgpack.packb(_message(r)) + r.randbytes(r.randint(1, 9))), MALFORMED)


def _noise(r: random.Random, _: int) -> Bad:
    """No map: the first byte says so."""
    return _bad(_posted(bytes([r.randint(0x90, 0xDD)]) + r.randbytes(50)), MALFORMED)


def _a_lie(r: random.Random, _: int) -> Bad:
    shape = r.choice(([2**40, 2**20], [-1, 4], [1e9, 1e9], "3,4", [3, 4, 1, 1, 1, 1, 1, 1, 2**62]))
    return _bad(_posted(msgpack.packb(_message(r, q=_tensor(r, 3, 4, shape=shape)))), MALFORMED)


def _bad_json(r: random.Random, _: int) -> Bad:
    text = r.choice(('{"q": [[NaN]]}', '{"a": 1, "a": 2}', "{", "[1]", '{"scale": 1e999}'))
    return _bad(_posted(text.encode(), JSON), MALFORMED)


def _bad_offsets(r: random.Random, _: int) -> Bad:
    packed = {name: _tensor(r, 3, 1, 4) for name in "qkv"}
    offsets = r.choice(([0, 4], [1, 3], [0, 3, 2], [0, -1, 3]))
    body = msgpack.packb(packed | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets})
    return _bad(_posted(body), INVALID, by_worker=True)


def _too_much(r: random.Random, _: int) -> Bad:
    """A small request for a large intermediate."""
    long = {name: _tensor(r, 9000, 1) for name in "qkv"}
    body = msgpack.packb(long | {"backend": "reference"})
    return _bad(_posted(body), (507, "not_enough_memory"), by_worker=True)


def _unknown_residual(r: random.Random, _: int) -> Bad:
    if r.random() < 0.5:
        path = _NEVER + r.randbytes(24).hex()
        return _bad(Request(method="DELETE", path=path), (404, "not_found"))
    body = {"residual": r.randbytes(24).hex(), "dout": [[1.0]]}
    request = _posted(json.dumps(body).encode(), JSON, "/attention/backward")
    return _bad(request, (404, "not_found"))


def _nowhere(r: random.Random, _: int) -> Bad:
    if r.random() < 0.5:
        return _bad(Request(path=f"/{r.randbytes(8).hex()}", body=b"x"), (404, "not_found"))
    return _bad(Request(method="PUT", body=b"x"), (405, "method_not_allowed"))


def _media_type(r: random.Random, _: int) -> Bad:
    request = _posted(r.randbytes(20), r.choice(("text/plain", "image/png", "x")))
    return _bad(request, (415, "unsupported_media_type"))


def _deadline(r: random.Random, _: int) -> Bad:
    value = r.choice(("soon", "0", "-1", "1.5", ""))
    request = _posted(msgpack.packb(_message(r)), flashwire_timeout_ms=value)
    return _bad(request, INVALID)


def _claimed_huge(r: random.Random, max_body: int) -> Bad:
    """Refused by what Content-Length says: none of it is sent."""
    head = _posted(b"").head({"content-length": str(max_body + r.randint(1, 10**12))})
    return Bad((head,), (413, "too_large"))


def _sent_huge(r: random.Random, max_body: int) -> Bad:
    """Refused as soon as the count passes the limit."""
    size = max_body + 2**18
    flags = {"dtype": "bool", "shape": [size], "data": bytes(size)}
    request = _posted(msgpack.packb({"mask": flags}))
    return Bad(tuple(request.chunked(2**16)), (413, "too_large"))


def _large_head(r: random.Random, _: int) -> Bad:
    request = Request(method="GET", path="/healthz", headers={"x": "y" * r.randint(40_000, 90_000)})
    return _bad(request, (431, "headers_too_large"))


def _garbage(r: random.Random, _: int) -> Bad:
    return Bad((bytes([r.randrange(0x80, 0x100)]) + r.randbytes(30) + b"\r\n\r\n",), MALFORMED)


Maker = Callable[[random.Random, int], Bad]


def _makers() -> Iterator[Maker]:
    yield from (_truncated, _trailing, _noise, _a_lie, _bad_json, _bad_offsets, _too_much)
    yield from (_unknown_residual, _nowhere, _media_type, _deadline)
    yield from (_claimed_huge, _sent_huge, _large_head, _garbage)
    for change in ({"cusal": True}, {"causal": 1}, {"scale": "1"}, {"q": None}, {"window": [1]},
                   {"dropout": {"p": 1.0}}, {"version": 2}, {"softcap": -1.0}):  # fmt: skip
        yield _of_message(INVALID, **change)
    yield _of_message((422, "unsupported_backend"), by_worker=True, backend="triton")


_MAKERS = tuple(_makers())

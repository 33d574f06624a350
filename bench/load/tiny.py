"""The smallest attention, one query and one key, which needs no reference: its out is its v."""

from __future__ import annotations

import json
import random

import msgpack
import numpy as np

from flashwire import wire
from load.connection import JSON, MSGPACK, Reply, Request


def build(seed: int) -> tuple[Request, float]:
    """One query, one key: (the request, its out)."""
    r = random.Random(seed)
    q, k, v = (float(np.float32(r.uniform(-2, 2))) for _ in range(3))
    values = {"q": [[q]], "k": [[k]], "v": [[v]]}
    if seed % 2:
        body, kind = json.dumps(values).encode(), JSON
    else:
        tensors = {n: np.float32(x[0][0]).tobytes() for n, x in values.items()}
        described = {
            n: {"dtype": "float32", "shape": [1, 1], "data": raw} for n, raw in tensors.items()
        }
        body, kind = msgpack.packb(described), MSGPACK
    return Request(headers={"content-type": kind}, body=body), v


def out_of(reply: Reply) -> float:
    """The out of a reply to `build`."""
    if reply.headers["content-type"] == JSON:
        return float(json.loads(reply.body)["out"][0][0])
    ((at, size),) = wire.decode(reply.body, wire.REPLY).tensors["out"].segments
    return float(np.frombuffer(reply.body[at : at + size], "<f4")[0])

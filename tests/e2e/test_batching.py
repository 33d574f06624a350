"""Batching on a real server: small requests that wait are computed together; nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

CLIENTS, REQUESTS = 16, 1000
SHAPES = (
    {"heads": (2, 2), "dim": 16},
    {"heads": (4, 2), "dim": 16, "causal": True},
    {"heads": (4, 1), "dim": 24, "causal": True, "window": (20, 0)},
    {"heads": (2, 2), "dim": 16, "softcap": 3.0},
)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)


@pytest.fixture
def batching(start_server: Callable[..., Any]) -> Any:
    return start_server("--batch-tokens", "4096")


def batch_sizes(server: Any) -> dict[str, float]:
    """The histogram: how many batches had at most so many requests."""
    lines = server.http.get("/metrics").text.splitlines()
    rows = [line.partition("flashwire_batch_requests_")[2] for line in lines]
    return {row.split()[0]: float(row.split()[1]) for row in rows if row}


class Request:
    """Small, of lengths of its own. Numbers that follow each other are of one kind, since clients
    that take them in turn then have the same kinds wait at the same time.
    """

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng(number)
        block = number // 20
        kind = dict(SHAPES[block % len(SHAPES)])
        (hq, hkv), dim = kind.pop("heads"), kind.pop("dim")
        dtype = DTYPES[block // len(SHAPES) % len(DTYPES)]
        len_q, len_k = (int(n) for n in rng.integers(1, 48, 2))

        def array(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(dtype)

        self.packed = number % 5 == 0
        self.options: dict[str, Any] = kind
        if self.packed:
            self.options["cu_seqlens_q"] = [0, len_q // 2, len_q]
            self.options["cu_seqlens_k"] = [0, len_k // 3, len_k]
            shapes = [(len_q, hq, dim), (len_k, hkv, dim), (len_k, hkv, dim)]
        else:
            b = 1 + number % 2
            shapes = [(b, hq, len_q, dim), (b, hkv, len_k, dim), (b, hkv, len_k, dim)]
        self.q, self.k, self.v = (array(*shape) for shape in shapes)
        self.dout = array(*shapes[0]) if block % 3 == 0 else None

    def send(self, client: Any) -> list[bytes]:
        if self.dout is None:
            r = client.attention(self.q, self.k, self.v, return_lse=True, **self.options)
            return [r.out.tobytes(), r.lse.tobytes()]
        g = client.gradients(self.q, self.k, self.v, self.dout, **self.options)
        return [t.tobytes() for t in (g.dq, g.dk, g.dv)]


def test_a_thousand_requests_in_company_have_the_bits_that_they_have_alone(
    batching: Any,
) -> None:
    requests = [Request(number) for number in range(REQUESTS)]
    with batching.client() as client:
        alone = [request.send(client) for request in requests]
        before = batch_sizes(batching)
        with ThreadPoolExecutor(CLIENTS) as clients:
            together = list(clients.map(lambda request: request.send(client), requests))
    wrong = [n for n, (a, b) in enumerate(zip(alone, together, strict=True)) if a != b]
    assert not wrong
    after = batch_sizes(batching)
    launches, computed = (after[name] - before[name] for name in ("count", "sum"))
    assert computed == REQUESTS
    several = launches - (after['bucket{le="1.0"}'] - before['bucket{le="1.0"}'])
    assert several > 50
    assert before["count"] == before["sum"]  # one by one, each was alone

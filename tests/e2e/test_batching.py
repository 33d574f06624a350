"""Batching on a real server: small requests that wait are computed together; nobody can tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwire import errors

HERE = Path(__file__).parent
CLIENTS, REQUESTS = 16, 1000
HOLD, DEADLY = 6004.0, 77.0  # faults of held_worker.py
SHAPES = (
    {"heads": (2, 2), "dim": 16},
    {"heads": (4, 2), "dim": 16, "causal": True},
    {"heads": (4, 1), "dim": 24, "causal": True, "window": (20, 0)},
    {"heads": (2, 2), "dim": 16, "softcap": 3.0},
)
IN_FLIGHT = "flashwire_requests_in_flight "  # /metrics itself included
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


class Held:
    """A server whose worker is held up while requests gather."""

    def __init__(self, server: Any, file: Path) -> None:
        self.server = server
        self.client = server.client(retries=0)
        self._file = file

    def together(self, *qs: Any) -> list[Any]:
        """Each q's Result, or the code of its error, of requests that all waited in this order."""
        self._file.touch()
        with ThreadPoolExecutor(len(qs) + 1) as threads:
            asked = [threads.submit(self.attention, np.ones((1, 1, 1, 1), "f4"), scale=HOLD)]
            until(lambda: waiting(self.server) == 0 and metric(self.server, IN_FLIGHT) == 2)
            for number, q in enumerate(qs, 1):
                asked.append(threads.submit(self.attention, q))
                until(lambda number=number: waiting(self.server) == number)
            self._file.unlink()
            return [task.result() for task in asked][1:]

    def attention(self, q: Any, **options: Any) -> Any:
        try:
            return self.client.attention(q, q, q, **options)
        except errors.FlashwireError as exc:
            return exc.code

    def close(self) -> None:
        self.client.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def metric(server: Any, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def waiting(server: Any) -> float:
    return metric(server, "flashwire_queue_requests{")


@pytest.fixture
def held(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Held]:
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    server = start_server("--batch-tokens", "4096", program=(str(HERE / "held_service.py"),))
    made = Held(server, tmp_path / "held")
    yield made
    made.close()


def test_whoever_dies_in_company_is_tried_alone_and_only_who_kills_is_quarantined(
    held: Held,
) -> None:
    rng = np.random.default_rng(1)
    good = [rng.standard_normal((1, 2, n, 8)).astype("f4") for n in (3, 9, 9, 20)]
    alone = [held.attention(q) for q in good]
    before = batch_sizes(held.server)
    found = held.together(*good)
    for a, b in zip(alone, found, strict=True):
        np.testing.assert_array_equal(a.out, b.out)
    assert {r.meta["timings_ms"]["compute"] for r in found} == {
        found[0].meta["timings_ms"]["compute"]
    }
    after = batch_sizes(held.server)
    assert after["count"] - before["count"] == 2  # what held it up, and all others at once
    assert after["sum"] - before["sum"] == 5

    deadly = np.full((1, 2, 4, 8), DEADLY, "f4")
    assert held.together(*good, deadly) == ["worker_died"] * 5
    held.server.wait_ready()
    *found, last = held.together(*good, deadly)
    assert last == "quarantined"
    for a, b in zip(alone, found, strict=True):
        np.testing.assert_array_equal(a.out, b.out)
    held.server.wait_ready()
    assert metric(held.server, "flashwire_quarantined_requests ") == 1
    found = held.together(*good)
    for a, b in zip(alone, found, strict=True):
        np.testing.assert_array_equal(a.out, b.out)
    assert held.attention(deadly) == "quarantined"

"""Callers that share memory with the server get the same answers as over HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from local_caller import sealed
from shared_server import KEY, Shared, body, normal

from flashwire import AsyncClient, Client, wire
from flashwire.local.transport import AsyncSharedTransport, SharedTransport


@pytest.fixture(autouse=True)
def end(shared: Shared) -> Iterator[None]:
    yield
    shared.end_callers()


@pytest.fixture
def client(shared: Shared) -> Iterator[Client]:
    with shared.client() as connected:
        yield connected


def same(a: Any, b: Any) -> None:
    for name in ("out", "lse", "dq", "dk", "dv"):
        x, y = getattr(a, name, None), getattr(b, name, None)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            assert x.tobytes() == y.tobytes()


# The same as over HTTP


@pytest.mark.parametrize("length", [16, 700])  # in the packet; in memory
def test_results_are_those_of_http_bit_for_bit(shared: Shared, client: Client, length: int) -> None:
    q, k, v, dout = (normal(1, 4, length, 32) for _ in range(4))
    options: dict[str, Any] = {"causal": True, "return_lse": True, "save_for_backward": True}
    with shared.server.client() as plain:
        ours, theirs = (c.attention(q, k, v, **options) for c in (client, plain))
        same(ours, theirs)
        same(client.backward(ours, dout), plain.backward(theirs, dout))
        same(client.gradients(q, k, v, dout), plain.gradients(q, k, v, dout))
        checks = [c.check(q, k, v, mine=ours).passed for c in (client, plain)]
        assert checks[0] == checks[1]
        plans = [c.plan(q.shape, k.shape, dtype="float32") for c in (client, plain)]
        assert plans[0] == plans[1]
        assert client.release(ours) is None


def test_results_are_writable_and_outlive_the_client(shared: Shared) -> None:
    q = normal(1, 4, 900, 64)
    with shared.client() as client:
        first = client.attention(q, q, q).out
        before = first.copy()
        others = [client.attention(q + n, q, q).out for n in range(1, 4)]
    assert (first == before).all()
    first[:] = 7
    assert all((other != 7).all() for other in others)


def test_many_threads_share_a_client(client: Client) -> None:
    wrong: list[int] = []

    def ask(value: int) -> None:
        x = np.full((1, 2, 300, 64), value, np.float32)
        got = [client.attention(x, x, x).out for _ in range(8)]
        wrong.extend(value for out in got if not np.allclose(out, value, rtol=1e-5))

    askers = [threading.Thread(target=ask, args=(n,)) for n in range(1, 7)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert not wrong


def test_async(shared: Shared) -> None:
    q = normal(1, 4, 900, 64)

    async def ask() -> None:
        url = f"unix://{shared.path}"
        async with AsyncClient(url, api_key=KEY, shared_memory=True) as client:
            got: list[Any] = []

            async def one() -> None:
                got.append((await client.attention(q, q, q)).out)

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(one)
            assert all((out == got[0]).all() for out in got)
            slow = normal(1, 8, 1500, 64)
            with anyio.move_on_after(0.1) as scope:
                await client.attention(slow, slow, slow, backend="reference")
            assert scope.cancelled_caught

    anyio.run(ask)


X = normal(1, 4, 512, 32)
LARGE = body({}, q=X, k=X, v=X)
PACKED = normal(900, 2, 32)
TYPES = {"content-type": wire.MEDIA_TYPE}
ERRORS: list[dict[str, Any]] = [
    {"url": "/attention", "content": LARGE[:-1], "headers": TYPES},
    {"url": "/attention", "content": LARGE + b"\0", "headers": TYPES},
    {"url": "/attention", "content": body({"scale": "x"}, q=X, k=X, v=X), "headers": TYPES},
    {"url": "/attention", "content": body({}, q=X, k=X[:, :3], v=X), "headers": TYPES},
    {"url": "/attention", "content": b"\xc1", "headers": TYPES},
    {"url": "/attention", "content": LARGE, "headers": {"content-type": "text/plain"}},
    {"url": "/attention", "content": LARGE, "headers": {**TYPES, "authorization": "Bearer no"}},
    {"url": "/attention", "content": LARGE, "headers": {**TYPES, "flashwire-timeout-ms": "x"}},
    {"url": "/attention/backward", "content": body({"residual": "x"}, dout=X), "headers": TYPES},
    {"url": "/nowhere", "content": LARGE, "headers": TYPES},
    {"url": "/attention", "method": "GET"},
    {"url": "/attention", "json": {"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]]}},
    {"url": "/attention", "json": {"q": [[0] * 4096] * 9, "k": [[0] * 4096] * 9, "v": 3}},
    {"url": "/attention/plan", "json": {"q": {"dtype": "float32", "shape": [1, 2, 3, 4]}}},
    {"url": "/healthz", "method": "GET"},
    {"url": "/openapi.json", "method": "GET"},
    {"url": "/", "method": "HEAD"},
]


@pytest.mark.parametrize("request_", ERRORS, ids=lambda r: f"{r['url']}-{ERRORS.index(r)}")
def test_replies_are_those_of_http(shared: Shared, request_: dict[str, Any]) -> None:
    arguments = {"method": "POST", **request_}
    headers = {"x-request-id": "same", **arguments.pop("headers", {})}
    with shared.http() as http:
        ours, theirs = (c.request(headers=headers, **arguments) for c in (http, shared.server.http))
    assert ours.status_code == theirs.status_code
    drop = ("date", "content-length", "connection")
    kept = [{k: v for k, v in r.headers.items() if k not in drop} for r in (ours, theirs)]
    assert kept[0] == kept[1]
    if arguments["url"] == "/attention" and theirs.is_success:
        assert ours.json()["out"] == theirs.json()["out"]
    else:
        assert ours.content == theirs.content


@pytest.mark.parametrize("route", ["/attention", "/attention/check"])
def test_offsets_as_lists_need_no_place_in_the_callers_memory(shared: Shared, route: str) -> None:
    offsets = {"cu_seqlens_q": [0, 400, 900], "cu_seqlens_k": [0, 400, 900]}
    if route == "/attention":
        sent = body(offsets, q=PACKED, k=PACKED, v=PACKED)
    else:
        arrays = {f"request__{name}": PACKED for name in "qkv"}
        sent = body({"request": offsets}, **arrays)
    fd = sealed(sent)
    with shared.caller() as caller:
        caller.send(caller.packet(route.encode(), size=len(sent)), [fd])
        got = caller.receive()
    assert got is not None
    assert got[0].status == 200, got[1]
    assert os.pread(fd, len(sent), 0) == sent
    os.close(fd)


# What may not be there


def test_without_a_side_socket_all_goes_the_ordinary_way(tmp_path: Path) -> None:
    seen: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(len(request.read()))
        return httpx.Response(200, json={})

    transport = SharedTransport(str(tmp_path / "x"), httpx.MockTransport(answer))
    with httpx.Client(transport=transport, base_url="http://localhost") as http:
        with pytest.warns(RuntimeWarning, match="no shared memory with the server"):
            http.post("/attention", content=LARGE)
        http.post("/attention", content=LARGE)  # one warning only: more would be an error
    assert seen == [len(LARGE)] * 2


def test_the_side_socket_is_as_private_as_the_other(shared: Shared) -> None:
    assert os.stat(shared.path + ".shm").st_mode & 0o777 == 0o600


def test_a_timeout_is_an_exception_of_ours(shared: Shared) -> None:
    transport = SharedTransport(shared.path, httpx.HTTPTransport())
    slow = normal(1, 8, 1500, 64)
    sent = body({"backend": "reference"}, q=slow, k=slow, v=slow)
    headers = {**TYPES, "authorization": f"Bearer {KEY}"}
    with httpx.Client(transport=transport, base_url="http://x") as http:
        request = http.build_request(
            "POST", "/attention", content=sent, headers=headers, timeout=0.05
        )
        with pytest.raises(httpx.ReadTimeout):
            http.send(request)


async def test_without_a_side_socket_async(tmp_path: Path) -> None:
    ordinary = httpx.MockTransport(lambda request: httpx.Response(200, json={}))
    transport = AsyncSharedTransport(str(tmp_path / "x"), ordinary)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        with pytest.warns(RuntimeWarning, match="no shared memory with the server"):
            reply = await http.post("/attention", content=LARGE)
    assert reply.status_code == 200


def test_only_a_server_on_this_machine_shares_memory() -> None:
    with pytest.raises(ValueError, match="shared_memory needs a url unix:///path"):
        Client("http://127.0.0.1:8000", shared_memory=True)

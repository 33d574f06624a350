"""The routes over a pool that stands in for workers: what reaches a job, what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import html
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from fastapi import Depends, Request

from flashwire import wire
from flashwire_service import residual_id
from flashwire_service.errors import Refusal
from flashwire_service.front import info
from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Work
from flashwire_service.front.routes import ComputeRoute
from flashwire_service.front.schemas import EXAMPLES
from flashwire_service.ipc.frames import Reply, State, WorkerState
from flashwire_service.ipc.memory import Memory
from flashwire_service.keys import digest_of, listed
from flashwire_service.logs import Log
from flashwire_service.settings import Settings

QUIET = Log("front", "error")
SMALL: dict[str, Any] = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]]}

Starved = Callable[[], contextlib.AbstractContextManager[None]]


class FakePool:
    """Answers each job with `answer`, and remembers them."""

    def __init__(self) -> None:
        self.ready = True
        self.draining = False
        self.facts: dict[int, dict[str, Any]] = {0: {"device": "cpu", "pid": 1, "gflops": 50.0}}
        self.state = State()
        self.jobs: list[tuple[Work, int | None]] = []
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self.answer: Callable[[], Answer] = lambda: Answer(Reply(id=1, size=2, body=b"{}"), None, 0)
        self.delay = 0.0

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        self.jobs.append((work, worker))
        self.bodies.append(
            bytes(work.body.view) if isinstance(work.body, Memory) else bytes(work.body)
        )
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.answer()


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


def connect(pool: FakePool, settings: Settings | None = None) -> httpx.AsyncClient:
    app = create_app(settings or Settings(), pool, QUIET)
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def client(pool: FakePool) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(pool) as client:
        yield client


def packed(options: dict[str, Any], **tensors: np.ndarray[Any, Any]) -> bytes:
    ready = {
        name: (wire.Header(str(a.dtype), a.shape), memoryview(a.tobytes()))
        for name, a in tensors.items()
    }
    return wire.encode(options, ready)


def qkv(*shape: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.ones(shape, np.float32) for name in "qkv"}


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["error"] == document["detail"]
    assert document["request_id"] == response.headers["x-request-id"]
    return document


async def test_a_message_reaches_the_worker_as_it_is(
    client: httpx.AsyncClient, pool: FakePool
) -> None:
    message = packed({"causal": True, "window": [3, None]}, **qkv(1, 2, 3, 4))
    response = await client.post("/attention", content=message)
    assert response.status_code == 200
    work, worker = pool.jobs[0]
    assert (work.route, work.options, worker) == (
        "attention",
        {"causal": True, "window": [3, None]},
        None,
    )
    assert pool.bodies[0] == message
    assert work.tensors["q"].shape == (1, 2, 3, 4)
    ((at, size),) = work.tensors["v"].segments
    assert message[at : at + size] == np.ones(24, np.float32).tobytes()
    assert (work.accept, work.owner, work.timeout_s) == ("msgpack", "", 300.0)


async def test_a_large_message_goes_by_memory(client: httpx.AsyncClient, pool: FakePool) -> None:
    message = packed({}, **qkv(1, 8, 64, 64))
    await client.post("/attention", content=message)
    assert isinstance(pool.jobs[0][0].body, Memory)
    assert pool.bodies[0] == message
    assert pool.jobs[0][0].body.fd == -1  # closed once answered


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_pieces_make_the_same_message(
    client: httpx.AsyncClient, pool: FakePool, step: int
) -> None:
    message = packed({"causal": True}, **qkv(2, 8))

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(message), step):
            yield message[at : at + step]

    assert (await client.post("/attention", content=pieces())).status_code == 200
    assert pool.bodies[0] == message


async def test_json_and_its_reply(client: httpx.AsyncClient, pool: FakePool) -> None:
    response = await client.post("/attention", json=EXAMPLES["attention"])
    assert response.headers["content-type"] == "application/json"
    work = pool.jobs[0][0]
    assert work.accept == "json"
    assert work.options == {"causal": True, "return_lse": True}
    assert work.tensors["q"].shape == (2, 2)


async def test_accept_names_the_reply(client: httpx.AsyncClient, pool: FakePool) -> None:
    for accept, expected in [("application/msgpack", "msgpack"), ("text/html", "json"),
                             ("application/json, */*", "json")]:  # fmt: skip
        await client.post("/attention", json=SMALL, headers={"accept": accept})
        assert pool.jobs[-1][0].accept == expected


async def test_plain_offsets_become_tensors(client: httpx.AsyncClient, pool: FakePool) -> None:
    message = packed({"cu_seqlens_q": [0, 1, 3], "cu_seqlens_k": [0, 3, 3]}, **qkv(3, 2, 4))
    assert (await client.post("/attention", content=message)).status_code == 200
    work = pool.jobs[0][0]
    assert work.options == {}
    for name, values in (("cu_seqlens_q", [0, 1, 3]), ("cu_seqlens_k", [0, 3, 3])):
        ref = work.tensors[name]
        ((at, size),) = ref.segments
        assert at % 64 == 0
        assert (ref.dtype, ref.shape) == ("int64", (3,))
        assert np.frombuffer(pool.bodies[0][at : at + size], np.int64).tolist() == values


async def test_a_dropout_gets_a_seed(client: httpx.AsyncClient, pool: FakePool) -> None:
    for _ in range(2):
        await client.post("/attention", json=SMALL | {"dropout": {"p": 0.5}})
    seeds = [work.options["dropout"]["seed"] for work, _ in pool.jobs]
    assert seeds[0] != seeds[1]
    await client.post("/attention", json=SMALL | {"dropout": {"p": 0.5, "seed": str(2**64 - 1)}})
    assert pool.jobs[-1][0].options["dropout"]["seed"] == 2**64 - 1


async def test_a_reply_that_cannot_be_mapped_is_a_refusal(
    client: httpx.AsyncClient, pool: FakePool, starved: Starved
) -> None:
    memory = Memory.create(50_000)
    pool.answer = lambda: Answer(Reply(id=1, size=50_000), memory, 0)
    with starved():
        reply = await client.post("/attention", json=SMALL)
    assert (reply.status_code, reply.json()["code"]) == (429, "queue_full")
    assert memory.fd < 0


async def test_a_large_reply_is_sent_from_memory(client: httpx.AsyncClient, pool: FakePool) -> None:
    payload = np.random.default_rng(0).bytes(700_001)

    def answer() -> Answer:
        memory = Memory.create()
        memory.write([payload])
        return Answer(Reply(id=1, size=len(payload)), memory, 0)

    pool.answer = answer
    response = await client.post("/attention", json=SMALL)
    assert response.content == payload
    assert response.headers["content-length"] == "700001"


async def test_every_violation_is_named(client: httpx.AsyncClient) -> None:
    body = SMALL | {"causl": True, "window": [-2, 0], "k": [[1, 0, 0]], "mask": [1, 0]}
    document = problem(await client.post("/attention", json=body), 422, "invalid")
    reasons = " | ".join(document["reasons"])
    for part in ("did you mean 'causal'", "window: must be at least -1", "k: head_dim", "mask: "):
        assert part in reasons
    assert document["field"] == document["reasons"][0].partition(":")[0]


async def test_missing_tensors_are_named(client: httpx.AsyncClient) -> None:
    document = problem(await client.post("/attention", json={"q": [[1]]}), 422, "invalid")
    assert document["reasons"] == ["k: is missing", "v: is missing"]
    problem(await client.post("/attention", json={}), 422, "invalid")


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"", "malformed"), (b"\x80", "invalid"), (b"\xc1", "malformed"), (b"\x93", "malformed"),
     (b"\x81\xa1q", "malformed"), (packed({}, **qkv(2, 2)) + b"\x00", "malformed"),
     (packed({}, **qkv(2, 2))[:-1], "malformed"), (b"\x81\x01\x01", "malformed"),
     (b"\x81\xa6causal\xc4\x01\x00", "invalid"),
     (b"\x82\xa6causal\xc2\xa6causal\xc3", "malformed")],
)  # fmt: skip
async def test_bytes_that_are_no_message(client: httpx.AsyncClient, body: bytes, code: str) -> None:
    problem(await client.post("/attention", content=body), {"malformed": 400}.get(code, 422), code)


async def test_claims_beyond_the_limit_are_refused_before_they_come(pool: FakePool) -> None:
    async with connect(pool, Settings(max_body_bytes=4096)) as client:
        huge = msgpack.packb({"q": {"dtype": "float32", "shape": [2**20], "data": b""}})
        claim = huge[:-2] + b"\xc6\x00\x40\x00\x00"
        problem(await client.post("/attention", content=claim + b"\0" * 4000), 400, "malformed")

        async def endless() -> AsyncIterator[bytes]:
            yield claim
            while True:
                yield b"\0" * 1024

        problem(await client.post("/attention", content=endless()), 413, "too_large")
        problem(await client.post("/attention", content=b"\0" * 4097), 413, "too_large")
    assert pool.jobs == []


async def test_json_has_a_limit_of_its_own(client: httpx.AsyncClient) -> None:
    body = b" " * (2**20 + 1)
    headers = {"content-type": "application/json"}
    problem(await client.post("/attention", content=body, headers=headers), 413, "too_large")

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 65536):
            yield body[at : at + 65536]

    problem(await client.post("/attention", content=pieces(), headers=headers), 413, "too_large")


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "text/plain"}, {"content-type": "application/x-msgpack"},
     {"content-encoding": "gzip"}, {"content-type": "application/json", "content-encoding": "br"}],
)  # fmt: skip
async def test_media_types_not_spoken(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await client.post("/attention", content=b"x", headers=headers)
    problem(response, 415, "unsupported_media_type")


async def test_media_types_spoken(client: httpx.AsyncClient) -> None:
    for content_type in ("application/json; charset=utf-8", "Application/JSON"):
        headers = {"content-type": content_type, "content-encoding": "identity"}
        body = json.dumps(SMALL).encode()
        response = await client.post("/attention", content=body, headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize("given", ["", "0", "-1", "1.5", "soon", "1e3", "0" * 5000, "\u0661"])
async def test_a_malformed_deadline(client: httpx.AsyncClient, given: str) -> None:
    headers = {b"flashwire-timeout-ms": given.encode()}
    response = await client.post("/attention", json=SMALL, headers=headers)  # type: ignore[arg-type]
    assert problem(response, 422, "invalid")["field"] == "Flashwire-Timeout-Ms"


async def test_a_deadline_is_clamped(client: httpx.AsyncClient, pool: FakePool) -> None:
    for given, seconds in (
        ("1500", 1.5), (" 0001500 ", 1.5), ("999999999", 300.0), ("9" * 5000, 300.0),
    ):  # fmt: skip
        await client.post("/attention", json=SMALL, headers={"flashwire-timeout-ms": given})
        assert pool.jobs[-1][0].timeout_s == seconds


async def test_request_ids(client: httpx.AsyncClient) -> None:
    response = await client.get("/healthz", headers={"x-request-id": "A.b_c-1"})
    assert response.headers["x-request-id"] == "A.b_c-1"
    for bad in ("", "two words", "x" * 129, "ü", "a/b"):
        headers = {b"x-request-id": bad.encode()}
        response = await client.get("/healthz", headers=headers)  # type: ignore[arg-type]
        assert len(response.headers["x-request-id"]) == 24


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    problem(await client.get("/nothing"), 404, "not_found")
    problem(await client.post("/attention/", json=SMALL), 404, "not_found")
    response = await client.get("/attention")
    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert (await client.head("/healthz")).status_code == 200
    response = await client.options("/attention")
    assert (response.status_code, response.headers["allow"]) == (204, "POST")


async def test_readiness_follows_the_workers(client: httpx.AsyncClient, pool: FakePool) -> None:
    assert (await client.get("/readyz")).json() == {"ready": True, "workers": 1}
    pool.ready = False
    response = await client.get("/readyz")
    problem(response, 503, "no_worker")
    assert response.headers["retry-after"] == "2"
    assert (await client.get("/healthz")).status_code == 200


async def test_why_it_is_not_ready(client: httpx.AsyncClient, pool: FakePool) -> None:
    pool.ready, now = False, time.monotonic()
    first = WorkerState(ready=False, since=now - 20, cause="", restarts=0, next_try=0.0)
    looping = dataclasses.replace(first, cause="device_lost", restarts=7, next_try=now + 500)
    pool.state = State(workers=(first, looping))
    response = await client.get("/readyz")
    reasons = problem(response, 503, "no_worker")["reasons"]
    assert re.fullmatch(r"worker 0: not ready for 2\d\.\d s, starting", reasons[0])
    ended = "restarts: 7, last end: device_lost, next try in"
    assert re.match(rf"worker 1: not ready for 2\d\.\d s, {ended} [45]\d\d\.\d s$", reasons[1])
    assert response.headers["retry-after"] == "2"
    pool.state = State(workers=(looping, dataclasses.replace(looping, next_try=now + 400)))
    response = await client.get("/readyz")
    assert 300 < int(response.headers["retry-after"]) <= 400
    pool.state = State(workers=(dataclasses.replace(first, ready=True),))
    reasons = problem(await client.get("/readyz"), 503, "no_worker")["reasons"]
    assert "not yet connected" in reasons[0]


async def test_what_a_worker_refuses_is_passed_on(
    client: httpx.AsyncClient, pool: FakePool
) -> None:
    def answer() -> Answer:
        raise Refusal("queue_full", "full", retry_after=3.2)

    pool.answer = answer
    response = await client.post("/attention", json=SMALL)
    problem(response, 429, "queue_full")
    assert response.headers["retry-after"] == "4"


async def test_a_body_for_which_there_is_no_descriptor_may_come_again(
    client: httpx.AsyncClient, pool: FakePool, starved: Starved
) -> None:
    message = packed({}, **qkv(1, 8, 64, 64))
    with starved():
        refused = await client.post("/attention", content=message)
    problem(refused, 429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await client.post("/attention", content=message)).status_code == 200


async def test_a_fault_of_ours_tells_nothing(client: httpx.AsyncClient, pool: FakePool) -> None:
    def answer() -> Answer:
        raise ZeroDivisionError("/secret/path")

    pool.answer = answer
    response = await client.post("/attention", json=SMALL)
    problem(response, 500, "internal")
    assert "secret" not in response.text


# Backward and residuals


async def test_backward_from_inputs(client: httpx.AsyncClient, pool: FakePool) -> None:
    assert (await client.post("/attention/backward", json=EXAMPLES["backward"])).status_code == 200
    assert pool.jobs[0][0].route == "backward"
    assert "dout" in pool.jobs[0][0].tensors


@pytest.mark.parametrize(
    ("change", "field"),
    [({"dout": None}, "dout"), ({"dout": [[1, 1, 1]]}, "dout"), ({"out": [[1, 1]]}, "lse"),
     ({"lse": [1]}, "out"), ({"dlse": [1, 2]}, "dlse"), ({"bias_grad": True}, "bias_grad"),
     ({"sinks_grad": True}, "sinks_grad"), ({"dropout": {"p": 0.1}}, "dropout"),
     ({"dout": {"dtype": "float16", "data": [[1, 1]]}}, "dout"), ({"release": True}, "release"),
     ({"save_for_backward": True}, "save_for_backward"), ({"residual": 3}, "residual")],
)  # fmt: skip
async def test_backward_refuses(
    client: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    body = SMALL | {"dout": [[1, 1]]} | change
    document = problem(await client.post("/attention/backward", json=body), 422, "invalid")
    assert field in [reason.partition(":")[0] for reason in document["reasons"]]


async def test_backward_by_residual_goes_to_its_worker(
    client: httpx.AsyncClient, pool: FakePool
) -> None:
    minted = residual_id.mint(Settings().signing_key, 5, "")
    body = {"residual": minted, "dout": [[1, 1]], "release": True}
    await client.post("/attention/backward", json=body)
    assert pool.jobs[0][0].options == {"residual": minted, "release": True}
    assert pool.jobs[0][1] == 5
    response = await client.delete(f"/attention/residual/{minted}")
    assert (response.status_code, response.content) == (204, b"")
    assert (pool.jobs[1][0].route, pool.jobs[1][1]) == ("release", 5)


async def test_a_residual_keeps_its_own_options(client: httpx.AsyncClient) -> None:
    minted = residual_id.mint(Settings().signing_key, 0, "")
    body = {"residual": minted, "dout": [[1, 1]], "q": [[1, 1]], "causal": True}
    document = problem(await client.post("/attention/backward", json=body), 422, "invalid")
    assert [r.partition(":")[0] for r in document["reasons"]] == ["causal", "q"]


async def test_ids_never_given_out(client: httpx.AsyncClient, pool: FakePool) -> None:
    stranger = residual_id.mint(b"another key of 32 bytes or so...", 0, "")
    for residual in (stranger, "x", "%00", "a%2Fb"):
        response = await client.delete(f"/attention/residual/{residual}")
        problem(response, 404, "not_found")
    body = {"residual": stranger, "dout": [[1]]}
    document = problem(await client.post("/attention/backward", json=body), 404, "not_found")
    assert document["field"] == "residual"
    assert pool.jobs == []


# Check and plan


async def test_check_reaches_the_worker(client: httpx.AsyncClient, pool: FakePool) -> None:
    body = {"request": SMALL | {"causal": True}, "mine": {"out": [[1, 2]]}}
    assert (await client.post("/attention/check", json=body)).status_code == 200
    work = pool.jobs[0][0]
    assert work.options["request"] == {"causal": True}
    assert {"request.q", "mine.out"} <= work.tensors.keys()


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "request"), ({"request": {}}, "request.q"), ({"request": 3}, "request"),
     ({"request": SMALL | {"qq": 1}}, "request.qq"),
     ({"request": SMALL, "mine": {"dq": [[1, 0]]}}, "dout"),
     ({"request": SMALL, "mine": {"out": [[1]]}}, "mine.out"),
     ({"request": SMALL, "dout": [[1]]}, "dout"), ({"request": SMALL, "backends": ["cpu"]},
     "backends"), ({"request": SMALL, "mine": {"p": 1}}, "mine.p")],
)  # fmt: skip
async def test_check_names_nested_fields(
    client: httpx.AsyncClient, body: dict[str, Any], field: str
) -> None:
    document = problem(await client.post("/attention/check", json=body), 422, "invalid")
    assert field in [reason.partition(":")[0] for reason in document["reasons"]]


async def test_plan_counts_as_the_paper_does(client: httpx.AsyncClient) -> None:
    body = {"q": {"shape": [16384, 128], "dtype": "float16"}, "sram_elements": 131072}
    response = await client.post("/attention/plan", json=body)
    assert response.status_code == 200
    counted = response.json()
    assert counted["bytes_materialised_s"] == 536870912
    assert counted["bytes_out_lse"] == 4259840
    assert counted["traffic_reduction"] == 8
    assert counted["wire_bytes_up"] - 3 * 16384 * 128 * 2 < 400
    packed_reply = await client.post("/attention/plan", content=msgpack.packb(body))
    assert msgpack.unpackb(packed_reply.content) == counted


@pytest.mark.parametrize(
    ("change", "field"),
    [({"q": None}, "q"), ({"q": {"shape": [4, 4], "dtype": "float31"}}, "q"),
     ({"k": {"shape": [4, 5], "dtype": "float16"}}, "k"), ({"sram_elements": 0}, "sram_elements"),
     ({"cu_seqlens_q": [0, 4]}, "cu_seqlens_k"), ({"q": {"shape": [2**40] * 4, "dtype": "float16"}},
     "q"), ({"cu_seqlens_q": ["a"]}, "cu_seqlens_q"),
     ({"cu_seqlens_q": {"shape": [2], "dtype": "int64"}}, "cu_seqlens_q")],
)  # fmt: skip
async def test_plan_refuses(client: httpx.AsyncClient, change: dict[str, Any], field: str) -> None:
    body = {"q": {"shape": [4, 4], "dtype": "float16"}} | change
    document = problem(await client.post("/attention/plan", json=body), 422, "invalid")
    assert field in [reason.partition(":")[0] for reason in document["reasons"]]


@pytest.mark.parametrize("path", ["", "/backward", "/check", "/plan"])
async def test_no_memory_is_kept_of_refused_requests(client: httpx.AsyncClient, path: str) -> None:
    offsets = [0] * 50_000  # too long to stay in this process, and no request
    message = packed({"cu_seqlens_q": offsets}) if path == "/plan" else packed({}, **qkv(99, 99))
    await client.get("/healthz")
    before = len(os.listdir("/proc/self/fd"))
    response = await client.post(f"/attention{path}", content=message)
    assert response.status_code in (200, 422)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_route_that_computes_gets_what_it_needs_or_is_refused() -> None:
    async def strange(request: Request) -> None: ...
    async def curious(request: Request, verbose: bool) -> None: ...

    with pytest.raises(TypeError, match="/x would not get"):
        ComputeRoute("/x", curious, methods=["POST"])
    with pytest.raises(TypeError, match="/x would not get"):
        ComputeRoute("/x", strange, methods=["POST"], dependencies=[Depends(strange)])


# Keys and web origins


async def test_keys(pool: FakePool) -> None:
    settings = Settings(api_keys=listed("right-key,other-key"))
    async with connect(pool, settings) as client:
        for path in ("/info", "/metrics", "/docs", "/openapi.json"):
            response = await client.get(path)
            problem(response, 401, "unauthorized")
            assert response.headers["www-authenticate"].startswith("Bearer")
            good = await client.get(path, headers={"authorization": "Bearer right-key"})
            assert good.status_code == 200
        for path in ("/healthz", "/readyz"):
            assert (await client.get(path)).status_code == 200
        for value in ("Bearer wrong-key", "Basic right-key", "Bearer", "right-key", "Bearer \xfc"):
            headers = {b"authorization": value.encode("latin-1")}
            response = await client.post("/attention", json=SMALL, headers=headers)  # type: ignore[arg-type]
            problem(response, 401, "unauthorized")
        assert pool.jobs == []
        for key in ("right-key", "other-key"):
            await client.post("/attention", json=SMALL, headers={"authorization": f"Bearer {key}"})
        assert pool.jobs[0][0].owner == digest_of("right-key").hex()
        assert pool.jobs[1][0].owner == digest_of("other-key").hex()
        mine = residual_id.mint(settings.signing_key, 0, digest_of("right-key").hex())
        for key, status in (("right-key", 204), ("other-key", 404)):
            response = await client.delete(
                f"/attention/residual/{mine}", headers={"authorization": f"Bearer {key}"}
            )
            assert response.status_code == status


async def test_web_origins(pool: FakePool) -> None:
    async with connect(pool, Settings(cors_origins=("https://a.example",))) as client:
        ask = {"access-control-request-method": "POST", "origin": "https://a.example"}
        allowed = await client.options("/attention", headers=ask)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = await client.options("/attention", headers=ask | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in refused.headers
        failed = await client.get("/nothing", headers={"origin": "https://a.example"})
        assert failed.headers["access-control-allow-origin"] == "https://a.example"
    async with connect(pool) as client:
        response = await client.options("/attention", headers=ask)
        assert "access-control-allow-origin" not in response.headers


async def test_metrics_count_routes_not_paths(client: httpx.AsyncClient, pool: FakePool) -> None:
    await client.get("/nothing/42")
    await client.post("/attention", json=SMALL)
    await client.post("/attention", json={})
    text = (await client.get("/metrics")).text
    count = "http_server_request_duration_seconds_count"
    for route, status in (("/attention", 200), ("/attention", 422)):
        error = "invalid" if status == 422 else ""
        labels = f'error_type="{error}",http_request_method="POST"'
        labels += f',http_response_status_code="{status}"'
        assert f'{count}{{{labels},http_route="{route}"}} 1.0' in text
    assert 'http_route="unmatched"' in text
    assert "/nothing" not in text
    assert 'flashwire_worker_up{worker="0"} 1.0' in text
    assert 'le="0.075"' in text
    assert "flashwire_requests_in_flight 1.0" in text  # this very request
    pool.facts = {}
    assert 'flashwire_worker_up{worker="0"} 0.0' in (await client.get("/metrics")).text


async def test_info(client: httpx.AsyncClient) -> None:
    document = (await client.get("/info")).json()
    assert document["device"] == "cpu"
    assert document["limits"]["max_body_bytes"] == Settings().max_body_bytes
    assert "signing_key" not in json.dumps(document)


async def test_the_documentation_describes_every_option(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    shown = document["components"]["schemas"]
    for name in ("AttentionRequest", "BackwardRequest", "CheckRequest", "PlanRequest"):
        assert name in shown
    for option, schema in shown["AttentionRequest"]["properties"].items():
        assert schema.get("description") or "$ref" in json.dumps(schema), option
    for path in ("/attention", "/attention/backward", "/attention/check", "/attention/plan"):
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["example"]
        assert "application/problem+json" in operation["responses"]["422"]["content"]
    docs = await client.get("/docs")
    assert docs.status_code == 200
    assert info.lacking() in html.unescape(docs.text)
    root = await client.get("/")
    assert (root.status_code, root.headers["location"]) == (307, "/docs")
    assert (await client.head("/")).status_code == 307


@pytest.mark.parametrize("route", list(EXAMPLES))
async def test_documented_examples_are_accepted(client: httpx.AsyncClient, route: str) -> None:
    path = "/attention" if route == "attention" else f"/attention/{route}"
    assert (await client.post(path, json=EXAMPLES[route])).status_code == 200

"""Every row of the contract's table of errors, sent to a real server.

After each, the same worker answers the next good request.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from flashwire import Client, errors

GOOD = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]]}
SLOW = np.zeros((1, 8, 2048, 64), np.float32)  # seconds on the reference


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    used = "narrow" if "narrow" in request.fixturenames else "server"
    server = request.getfixturevalue(used)
    before = server.worker_pids()
    yield
    server.check_unharmed()
    assert server.worker_pids() == before


def problem(reply: httpx.Response, status: int, code: str, field: str | None = None) -> Any:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    document = reply.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["error"] == document["detail"]
    assert document["request_id"] == reply.headers["x-request-id"]
    assert {"type", "title"} <= document.keys()
    assert "Traceback" not in reply.text
    assert "/site-packages" not in reply.text
    assert ".py" not in reply.text
    if field is not None:
        assert document["field"] == field
    return document


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [1, 1], "data": b"\0\0\0\0"} | changes


def message(**changes: Any) -> bytes:
    packed: bytes = msgpack.packb({"q": tensor(), "k": tensor(), "v": tensor()} | changes)
    return packed


# 400: bytes that are not what they claim


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"\xc1", None),
        (b"not msgpack", None),
        (message()[:-1], None),
        (message() + b"\0", None),
        (b"\x82\xa6causal\xc2\xa6causal\xc3", "causal"),
        (b"\x81\x01\xc2", None),
        (message(q=tensor(data=b"\0\0\0")), "q"),
        (message(v=tensor(data=b"\0" * 5)), "v"),
        (message(window=[[[[[[[[[[1]]]]]]]]]]), "window"),
        (message(**{f"x{i}": 1 for i in range(100)}), None),
        (message(dropout={f"x{i}": 1 for i in range(100)}), "dropout"),
        (message(layout="x" * 100_000), None),
    ],
)
def test_malformed_messages(server: Any, body: bytes, field: str | None) -> None:
    problem(server.post("/attention", content=body), 400, "malformed", field)


@pytest.mark.parametrize(
    "shape",
    [[-1, 4], [2, -3], [2**32, 2**32], [1e9, 1e9], [True, 4], "-1", [2**63, 2**63, 2**63],
     {"0": 1}, None, [None], [[1]], [1] * 20, [0.5]],
)  # fmt: skip
def test_shapes_that_are_none_or_a_lie(server: Any, shape: Any) -> None:
    body = message(q=tensor(shape=shape, data=b"\0" * 24))
    problem(server.post("/attention", content=body), 400, "malformed", "q")
    if shape is not None:
        document = GOOD | {"q": {"dtype": "float32", "shape": shape, "data": [[1, 2, 3, 4]]}}
        problem(server.post("/attention", json=document), 400, "malformed", "q")


@pytest.mark.parametrize(
    "text",
    ['{"scale": NaN}', '{"scale": 1e999}', '{"q": [Infinity]}', '{"a": 1, "a": 2}', "{", "[1]",
     '{"q": ' + "[" * 100 + "]" * 100 + "}"],
)  # fmt: skip
def test_malformed_json(server: Any, text: str) -> None:
    headers = {"content-type": "application/json"}
    problem(server.post("/attention", content=text, headers=headers), 400, "malformed")


def test_garbage_in_place_of_http(server: Any) -> None:
    reply = server.raw(b"\x00\x01\x02 nonsense\r\n\r\n")
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in head
    assert json.loads(body)["code"] == "malformed"


# 401, 404, 405, 408, 410, 413, 415, 431


def test_keys(narrow: Any) -> None:
    for authorization in ("", "Bearer wrong-key", "Basic Zmlyc3Q6a2V5"):
        reply = narrow.post("/attention", json=GOOD, headers={"authorization": authorization})
        problem(reply, 401, "unauthorized")
        assert reply.headers["www-authenticate"].startswith("Bearer")
    with Client(narrow.url, api_key="wrong-key") as client, pytest.raises(errors.Unauthorized):
        client.info()


def test_routes_and_methods_that_do_not_exist(server: Any) -> None:
    problem(server.http.get("/nowhere"), 404, "not_found")
    problem(server.http.get("/attention"), 405, "method_not_allowed")
    problem(server.http.delete("/attention"), 405, "method_not_allowed")


def test_residuals_never_seen_and_gone(server: Any) -> None:
    body = GOOD | {"save_for_backward": True}
    residual = server.post("/attention", json=body).json()["residual"]
    forged = ("A" if residual[0] != "A" else "B") + residual[1:]
    for never in ("nonsense", forged):
        problem(server.http.delete(f"/attention/residual/{never}"), 404, "not_found", "residual")
        reply = server.post("/attention/backward", json={"residual": never, "dout": [[1, 1]]})
        problem(reply, 404, "not_found", "residual")
    assert server.http.delete(f"/attention/residual/{residual}").status_code == 204
    problem(server.http.delete(f"/attention/residual/{residual}"), 410, "gone")
    reply = server.post("/attention/backward", json={"residual": residual, "dout": [[1, 1]]})
    problem(reply, 410, "gone")


def test_residuals_expire_and_are_their_owners_alone(narrow: Any) -> None:
    body = GOOD | {"save_for_backward": True}
    residual = narrow.post("/attention", json=body).json()["residual"]
    ask = {"residual": residual, "dout": [[1, 1]]}
    stranger = {"authorization": "Bearer second-key"}
    problem(narrow.post("/attention/backward", json=ask, headers=stranger), 404, "not_found")
    assert narrow.post("/attention/backward", json=ask).status_code == 200
    time.sleep(0.6)
    problem(narrow.post("/attention/backward", json=ask), 410, "gone")
    problem(narrow.post("/attention/backward", json=ask, headers=stranger), 404, "not_found")


def test_bodies_over_the_limit(narrow: Any) -> None:
    problem(narrow.post("/attention", content=b"\0" * (2**20 + 1)), 413, "too_large")
    head = b"POST /attention HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first-key\r\n"
    reply = narrow.raw(head + b"content-length: 99999999999\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 413 ")  # before any of it came


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"},
     {"content-encoding": "gzip"}],
)  # fmt: skip
def test_media_types(server: Any, headers: dict[str, str]) -> None:
    reply = server.post("/attention", content=b"x", headers=headers)
    problem(reply, 415, "unsupported_media_type")


def test_heads_over_the_limit(server: Any) -> None:
    reply = server.raw(b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n")
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["code"] == "headers_too_large"


# 422: well-formed and meaningless


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"q": None}, "q"),
        ({"k": [[1, 0, 0]]}, "k"),
        ({"v": [[1, 2]]}, "v"),
        ({"q": [1, 0]}, "q"),
        ({"q": [[[1, 0]]]}, "k"),
        ({"q": [[True, False]]}, "q"),
        ({"q": {"dtype": "float31", "data": [[1, 0]]}}, "q"),
        ({"k": {"dtype": "float16", "data": [[1, 0], [0, 1]]}}, "k"),
        ({"q": {"dtype": "float16", "data": [[1e6, 0]]}}, "q"),
        ({"q": [[1, 0], [1]]}, "q"),
        ({"mask": [[1, 0]]}, "mask"),
        ({"mask": {"dtype": "int64", "data": [[1, 0]]}}, "mask"),
        ({"mask": [[True, False, True]]}, "mask"),
        ({"mask": [[True], [False]]}, "mask"),
        ({"bias": [[True, False]]}, "bias"),
        ({"bias": [1, 2, 3]}, "bias"),
        ({"alibi_slopes": [1, 2]}, "alibi_slopes"),
        ({"sinks": [1, 2]}, "sinks"),
        ({"cu_seqlens_q": [0, 1]}, "cu_seqlens_k"),
        ({"cusal": True}, "cusal"),
        ({"causal": 1}, "causal"),
        ({"causal": "true"}, "causal"),
        ({"causal_align": "left"}, "causal_align"),
        ({"scale": "1"}, "scale"),
        ({"window": [1]}, "window"),
        ({"window": [-2, 0]}, "window"),
        ({"window": [0.5, 0]}, "window"),
        ({"softcap": -1}, "softcap"),
        ({"dropout": {"p": 1}}, "dropout.p"),
        ({"dropout": {"p": -0.1}}, "dropout.p"),
        ({"dropout": 0.5}, "dropout"),
        ({"dropout": {"p": 0.5, "seed": -1}}, "dropout.seed"),
        ({"dropout": {"p": 0.5, "seed": 2**64}}, "dropout.seed"),
        ({"layout": "hbld"}, "layout"),
        ({"precision": "fp8"}, "precision"),
        ({"backend": "cuda"}, "backend"),
        ({"version": 2}, "version"),
    ],
)
def test_meaningless_requests(server: Any, change: dict[str, Any], field: str) -> None:
    document = problem(server.post("/attention", json=GOOD | change), 422, "invalid")
    assert field in [reason.partition(":")[0] for reason in document["reasons"]]


@pytest.mark.parametrize(
    "shape", [[0, 2**62, 2**62, 4], [0, 2**64 - 1, 1, 4], [1, 0, 2**40, 2], [0, 2**31 - 1] * 2]
)
def test_sizes_beyond_any_machine(server: Any, shape: list[int]) -> None:
    """No bytes, since one size is 0; and yet nothing that strides could express."""
    empty = tensor(shape=shape, data=b"")
    for backend in ("auto", "reference"):
        body = message(q=empty, k=empty, v=empty, backend=backend)
        problem(server.post("/attention", content=body), 422, "invalid", "q")


def test_an_empty_batch_of_any_size_is_quick(server: Any) -> None:
    empty = tensor(shape=[2**31 - 1, 1, 0, 2], data=b"")
    started = time.monotonic()
    for backend in ("auto", "reference"):
        body = message(q=empty, k=empty, v=empty, backend=backend)
        assert server.post("/attention", content=body).status_code == 200
    assert time.monotonic() - started < 10


def test_the_nearest_known_name(server: Any) -> None:
    document = problem(server.post("/attention", json=GOOD | {"cusal": True}), 422, "invalid")
    assert "'causal'" in document["detail"]
    document = problem(server.post("/attention", content=message(bais=tensor())), 422, "invalid")
    assert (document["field"], "'bias'" in document["detail"]) == ("bais", True)


def test_every_violation_at_once(server: Any) -> None:
    body = GOOD | {"causal": 1, "window": [-5, 0], "k": [[1, 0, 0]], "sinks": [1, 2]}
    document = problem(server.post("/attention", json=body), 422, "invalid")
    fields = {reason.partition(":")[0] for reason in document["reasons"]}
    assert fields >= {"causal", "window", "k"}


def test_offsets_are_read_before_they_are_believed(server: Any) -> None:
    packed = {"q": [[[1]], [[1]]], "k": [[[1]], [[1]]], "v": [[[1]], [[1]]]}
    for offsets in ([0, 3], [1, 2], [0, 2, 1], [0, -1, 2]):
        body = packed | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        problem(server.post("/attention", json=body), 422, "invalid", "cu_seqlens_q")


def test_a_named_backend_says_every_reason(server: Any) -> None:
    document = problem(
        server.post("/attention", json=GOOD | {"backend": "triton"}), 422, "unsupported_backend",
        "backend",
    )  # fmt: skip
    assert document["reasons"]
    plan = {"q": {"shape": [4, 4], "dtype": "float32"}, "backend": "triton"}
    problem(server.post("/attention/plan", json=plan), 422, "unsupported_backend", "backend")


@pytest.mark.parametrize("given", ["soon", "0", "-5", "1.5"])
def test_malformed_deadlines(server: Any, given: str) -> None:
    reply = server.post("/attention", json=GOOD, headers={"flashwire-timeout-ms": given})
    problem(reply, 422, "invalid", "Flashwire-Timeout-Ms")


# 429, 504, 507


def test_a_full_queue(narrow: Any) -> None:
    """The queue has one place: of several at once, one computes, one waits, others are refused."""
    x = np.zeros((16, 1, 1000, 2), np.float32)
    outcomes: list[errors.QueueFull | None] = []

    def ask() -> None:
        with narrow.client(retries=0) as client:
            try:
                client.attention(x, x, x, backend="reference")
                outcomes.append(None)
            except errors.QueueFull as exc:
                outcomes.append(exc)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [exc for exc in outcomes if exc]
    assert len(outcomes) == 6
    assert 1 <= len(refused) <= 4
    for exc in refused:
        assert exc.status == 429
        assert exc.retry_after
        assert exc.retry_after >= 1


def test_a_worker_without_descriptors(server: Any) -> None:
    (pid,) = server.worker_pids()
    x = np.zeros((100_000,), np.float32).reshape(1, 10, 100, 100)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        with server.client(retries=0) as client, pytest.raises(errors.QueueFull) as caught:
            client.attention(x, x, x)
        assert caught.value.retry_after
        server.check_unharmed()  # small bodies need none
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    with server.client() as client:
        assert client.attention(x, x, x).out.shape == x.shape


def test_a_deadline_that_passes(server: Any) -> None:
    with server.client() as client, pytest.raises(errors.DeadlineExceeded) as caught:
        client.attention(SLOW, SLOW, SLOW, backend="reference", timeout=0.3)
    assert caught.value.status == 504


def test_more_memory_than_there_is(server: Any, narrow: Any) -> None:
    long, one = np.zeros((1_000_000, 1), np.float32), np.zeros((1, 1), np.float32)
    wide = np.zeros((1, 1_000_000), np.float32)
    with server.client() as client, pytest.raises(errors.NotEnoughMemory) as caught:
        client.attention(long, one, wide)  # 8 MB in, 4 TB out
    assert caught.value.status == 507
    assert any(digit in caught.value.detail for digit in "123456789")
    x = np.zeros((4000, 8), np.float32)
    with narrow.client() as client:
        for ask in (
            lambda: client.attention(x, x, x, backend="reference"),
            lambda: client.check(x, x, x),
        ):
            with pytest.raises(errors.NotEnoughMemory, match="FLASHWIRE_MAX_MATERIALISE_BYTES"):
                ask()

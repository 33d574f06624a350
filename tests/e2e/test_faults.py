"""Faults that users of comparable software reported, against a real server.

Each has the right value as its result. S is serving. The kernel cases (K) here are the ones that
the wire could spoil; tests/kernels has them all, for every backend.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
import torch

from flashwire import Client, errors
from flashwire.torch import flash_attention
from load import processes

ONE = np.ones((1, 1, 1, 1), np.float32)


def value_of(client: Client, v: Any, **options: Any) -> Any:
    """With a single key, out is v."""
    one = np.ones((1, 1, 1, 1), getattr(v, "dtype", np.float32))
    return client.attention(one, one, v, **options).out


# Encoding


def test_s01_byte_order_and_strides_are_the_clients_business(client: Client) -> None:
    big = np.array([1, 2, 3], ">f4").reshape(1, 1, 1, 3)
    np.testing.assert_array_equal(value_of(client, big), big.astype("<f4"))
    assert value_of(client, big).dtype.isnative
    fortran = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3))
    reverse = fortran[..., ::-1]
    for v in (fortran, reverse, np.broadcast_to(fortran[:, :, :1], (1, 1, 2, 3))):
        keys = np.zeros((1, 1, 2, 1), np.float32)
        out = client.attention(ONE, keys, v).out
        np.testing.assert_allclose(out, v.mean(2, keepdims=True), rtol=1e-6)
    offsets = np.array([0, 1], ">i4")
    packed = client.attention(
        ONE[0], ONE[0], big[0].astype("f4"), cu_seqlens_q=offsets, cu_seqlens_k=offsets
    ).out
    assert packed.tolist() == [[[1, 2, 3]]]


def test_s01_a_declared_byte_order_is_no_dtype(server: Any) -> None:
    one = {"dtype": "float32", "shape": [1, 1], "data": b"\0\0\x80?"}
    v = {"dtype": ">f4", "shape": [1, 1], "data": b"?\x80\0\0"}
    reply = server.post("/attention", content=msgpack.packb({"q": one, "k": one, "v": v}))
    assert (reply.status_code, reply.json()["field"]) == (422, "v")


def test_s02_bfloat16_bit_for_bit(client: Client) -> None:
    values = [0.01, 1.0, -2.5, 3e38]
    v = torch.tensor(values, dtype=torch.bfloat16).reshape(1, 1, 1, 4)
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    out = client.attention(one, one, v).out
    assert out.dtype is torch.bfloat16
    assert torch.equal(out.view(torch.int16), v.view(torch.int16))
    rounded = np.array(values, np.float32).astype(ml_dtypes.bfloat16).reshape(1, 1, 1, 4)
    for given, options in ((rounded, {}), (rounded.astype(np.float32), {"dtype": "bf16"})):
        one_like = np.ones((1, 1, 1, 1), given.dtype)
        got = client.attention(one_like, one_like, given, **options).out
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got.view(np.uint16), rounded.view(np.uint16))
    assert rounded.view(np.uint16)[0, 0, 0, 0] == 0x3C24


def test_s04_claimed_sizes_are_not_allocated(server: Any) -> None:
    before = rss(server)
    for shape in ([2**32, 2**32], [2**31, 1], [-1, 4], [10**9, 10**9]):
        body = {"q": {"dtype": "float32", "shape": shape, "data": b"\0" * 24}}
        assert server.post("/attention", content=msgpack.packb(body)).status_code == 400
    assert rss(server) - before < 32 * 2**20
    server.check_unharmed()


def rss(server: Any) -> int:
    """Resident bytes of all processes of a server."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    pages = 0
    for pid in [str(server.process.pid), *children.split()]:
        pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def chunked(pieces: list[bytes], head: bytes = b"") -> bytes:
    start = b"POST /attention HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first-key\r\n" + head
    body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)
    return start + b"transfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [65536, 1])
def test_s07_chunks_are_counted_as_they_come(narrow: Any, size: int) -> None:
    data = {"dtype": "bool", "shape": [2**21], "data": b"\0" * 2**21}
    message = msgpack.packb({"mask": data})
    pieces = [message[at : at + size] for at in range(0, 2**20 + 4096, size)]
    before = rss(narrow)
    reply = narrow.raw(chunked(pieces), timeout=60)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert rss(narrow) - before < 48 * 2**20
    narrow.check_unharmed()


def test_s07_a_chunked_request_is_the_same_request(narrow: Any) -> None:
    x = np.random.default_rng(1).standard_normal((2, 16, 32)).astype(np.float32)
    tensor = {"dtype": "float32", "shape": [2, 16, 32], "data": x.tobytes()}
    message = msgpack.packb(dict.fromkeys("qkv", tensor))

    def tail(reply: bytes) -> bytes:
        body = reply.partition(b"\r\n\r\n")[2]
        return body[body.index(b"out") : body.index(b"out") + x.nbytes]

    whole = narrow.http.post("/attention", content=message)
    pieces = [message[at : at + 1000] for at in range(0, len(message), 1000)]
    for head in (b"connection: close\r\n", b"connection: close\r\nexpect: 100-continue\r\n"):
        reply = narrow.raw(chunked(pieces, head))
        if b"expect" in head:
            assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
            reply = reply.partition(b"\r\n\r\n")[2]
        assert reply.startswith(b"HTTP/1.1 200 ")
        out = whole.content
        assert out[out.index(b"out") : out.index(b"out") + x.nbytes] == tail(reply)


def test_s09_one_message_has_one_reading(server: Any) -> None:
    one = msgpack.packb({"dtype": "float32", "shape": [1, 1], "data": b"\0\0\x80?"})
    inside = b"".join(msgpack.packb(name) + one for name in "qkv")
    twice = b"\x85" + inside + b"\xa6causal\xc2\xa6causal\xc3"
    reply = server.post("/attention", content=twice)
    assert (reply.status_code, reply.json()["field"]) == (400, "causal")
    headers = {"content-type": "application/json"}
    for text, name in (('{"q": [[1]], "q": [[2]]}', "q"), ('{"scale": NaN}', "NaN")):
        reply = server.post("/attention", content=text, headers=headers)
        assert reply.status_code == 400
        assert name in reply.json()["detail"]
    unknown = b"\x84" + inside + b"\xa5cause\xc3"
    reply = server.post("/attention", content=unknown)
    assert (reply.status_code, reply.json()["field"]) == (422, "cause")


# Connections and time


def test_s11_connections_at_the_edge_of_their_idle_time(narrow: Any) -> None:
    x = np.ones((2, 2), np.float32)
    with narrow.client() as client:
        for number in range(12):
            client.attention(x, x, x)
            time.sleep(0.4 + (number % 5 - 2) * 0.025)  # keep_alive_s is 0.4
        time.sleep(2)
        client.attention(x, x, x)


def test_s13_health_answers_beside_long_work(server: Any) -> None:
    slow = np.zeros((8, 8, 1024, 16), np.float32)
    large = np.zeros((1, 1, 1, 50_000_000), np.float32)
    failures: list[BaseException] = []

    def ask(call: Callable[[Client], Any]) -> None:
        try:
            with server.client() as client:
                call(client)
        except BaseException as exc:
            failures.append(exc)

    jobs: list[Callable[[Client], Any]] = [
        lambda c: c.attention(slow, slow, slow, backend="reference"),
        lambda c: c.attention(ONE, ONE, large),
    ]
    threads = [threading.Thread(target=ask, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    waits, began = [], time.monotonic()
    while len(waits) < 20 or any(thread.is_alive() for thread in threads):
        started = time.monotonic()
        path = ("/healthz", "/metrics", "/readyz")[len(waits) % 3]
        assert server.http.get(path).status_code == 200
        waits.append(time.monotonic() - started)
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert not failures
    # The case has half a second beside ten of work: on a slow machine both take longer.
    assert max(waits) < max(0.5, (time.monotonic() - began) / 20)


# Processes


def wait_until_busy(server: Any) -> None:
    """Until a request beside our own questions is in flight, and computed."""
    end = time.monotonic() + 60
    while "flashwire_requests_in_flight 2.0" not in server.http.get("/metrics").text:
        assert time.monotonic() < end
        time.sleep(0.02)
    before = cpu_ticks(server)
    while cpu_ticks(server) < before + 20:  # a fifth of a second, more than anything but computing
        assert time.monotonic() < end
        time.sleep(0.02)


def cpu_ticks(server: Any) -> int:
    """What its workers have used of the processor, in hundredths of a second."""
    lines = [Path(f"/proc/{pid}/stat").read_text() for pid in server.worker_pids()]
    return sum(int(line.rpartition(")")[2].split()[11]) for line in lines)


def test_s15_a_killed_worker_is_missed_at_once(start_server: Callable[..., Any]) -> None:
    server = start_server()
    small = {"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]], "save_for_backward": True}
    residual = server.post("/attention", json=small).json()["residual"]
    (victim,) = server.worker_pids()
    slow = np.zeros((8, 8, 2048, 16), np.float32)
    outcome: dict[str, Any] = {}

    def ask() -> None:
        with server.client(retries=0) as client:
            try:
                client.attention(slow, slow, slow, backend="reference")
            except errors.RequestError as exc:
                outcome["error"] = exc
            outcome["at"] = time.monotonic()

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until_busy(server)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    thread.join()
    assert isinstance(outcome["error"], errors.WorkerDied)
    assert outcome["at"] - killed < 5
    assert server.http.get("/readyz").status_code == 503
    assert server.http.get("/healthz").status_code == 200
    refused = server.post("/attention", json=small)
    assert (refused.status_code, refused.json()["code"]) == (503, "no_worker")
    assert int(refused.headers["retry-after"]) >= 1
    server.wait_ready()
    server.check_unharmed()
    assert server.worker_pids() != [victim]
    ask_again = {"residual": residual, "dout": [[1, 1]]}
    assert server.post("/attention/backward", json=ask_again).status_code == 410
    assert server.stop() == 0


def test_s17_nothing_is_left_in_shared_memory(start_server: Callable[..., Any]) -> None:
    before = processes.shared_memory()
    server = start_server("--workers", "2", ready=False)
    server.wait_ready(workers=2)
    v = np.random.default_rng(2).standard_normal((1, 1, 1, 200_000)).astype(np.float32)
    with server.client() as client:
        for _ in range(10):
            np.testing.assert_array_equal(value_of(client, v), v)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        for _ in range(10):
            np.testing.assert_array_equal(value_of(client, v), v)
        server.wait_ready(workers=2)
    assert server.stop() == 0
    assert "leaked" not in server.log
    assert "Traceback" not in server.log
    assert processes.shared_memory() <= before


def test_a_stop_finishes_what_is_in_flight(start_server: Callable[..., Any]) -> None:
    server = start_server()
    slow = np.zeros((3, 8, 1024, 16), np.float32)
    results: list[Any] = []

    def ask() -> None:
        with server.client(retries=0) as client:
            results.append(client.attention(slow, slow, slow, backend="reference"))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until_busy(server)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(ConnectionRefusedError):
        connect_while(thread.is_alive, server)
    thread.join()
    assert results[0].out.shape == slow.shape
    assert server.process.wait(20) == 0


def test_a_stop_past_its_grace_says_so(start_server: Callable[..., Any]) -> None:
    server = start_server("--grace-s", "0.2")
    slow = np.zeros((40, 8, 1024, 16), np.float32)
    caught: list[errors.FlashwireError] = []

    def ask() -> None:
        with server.client(retries=0) as client:
            try:
                client.attention(slow, slow, slow, backend="reference")
            except errors.FlashwireError as exc:
                caught.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until_busy(server)
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    assert isinstance(caught[0], errors.Draining)
    assert caught[0].request_id
    assert server.process.wait(20) == 0


def connect_while(condition: Callable[[], bool], server: Any) -> None:
    while condition():
        socket.create_connection((server.host, server.port), 1).close()
        time.sleep(0.02)


# Kernel cases that the wire could spoil


def column(*values: float) -> Any:
    return np.array(values, np.float32).reshape(1, 1, -1, 1)


def test_k01_a_row_that_sees_nothing(server: Any) -> None:
    body = {"q": [[1, 0], [0, 1]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]],
            "mask": [[True, False], [False, False]]}  # fmt: skip
    reply = server.post("/attention", json=body | {"return_lse": True}).json()
    assert reply["out"] == [[1, 2], [0, 0]]
    assert reply["lse"] == [pytest.approx(0.707107, abs=1e-6), "-Infinity"]
    found = server.post("/attention/backward", json=body | {"dout": [[1, 1], [1, 1]]}).json()
    assert found["dv"] == [[1, 1], [0, 0]]
    assert found["dq"] == found["dk"] == [[0, 0], [0, 0]]


def test_k03_decoding_sees_every_key_on_every_path(server: Any, client: Client) -> None:
    q, k, v = [[0, 0]], [[1, 0], [2, 0], [3, 0]], [[3, 0], [6, 0], [9, 0]]
    body = {"q": q, "k": k, "v": v, "causal": True, "return_lse": True}
    reply = server.post("/attention", json=body).json()
    assert reply["out"] == [pytest.approx([6, 0])]
    assert reply["lse"] == [pytest.approx(1.098612, abs=1e-6)]
    arrays = [np.array(x, np.float32) for x in (q, k, v)]
    assert client.attention(*arrays, causal=True).out.tolist() == [pytest.approx([6, 0])]
    top = client.attention(*arrays, causal=True, causal_align="top_left").out
    assert top.tolist() == [[3, 0]]


def test_k11_a_gradient_in_another_order(client: Client) -> None:
    torch.manual_seed(0)
    g = torch.arange(24.0).reshape(1, 3, 2, 4).transpose(1, 2)
    found = []
    base = [torch.randn(1, 2, 3, 4) for _ in range(3)]
    for gradient in (g, g.contiguous()):
        leaves = [t.clone().requires_grad_() for t in base]
        flash_attention(*leaves, client=client).backward(gradient)
        found.append([t.grad for t in leaves])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    q, k, v = (t.numpy() for t in base)
    fortran = client.gradients(q, k, v, np.asfortranarray(g.numpy()))
    np.testing.assert_array_equal(fortran.dq, found[0][0].numpy())


def test_k13_heads_are_repeated_not_tiled(server: Any, client: Client) -> None:
    q, k = np.zeros((1, 4, 1, 1), np.float32), np.zeros((1, 2, 1, 1), np.float32)
    v = np.array([10, 20], np.float32).reshape(1, 2, 1, 1)
    assert client.attention(q, k, v).out.ravel().tolist() == [10, 10, 20, 20]
    with pytest.raises(errors.Invalid, match="divide"):
        client.attention(q[:, :3], k, v)


def test_k15_more_rows_than_a_launch_dimension_holds(client: Client) -> None:
    v = (np.arange(65536) % 1000).astype(np.float16)
    for shape in ((65536, 1, 1, 1), (1, 65536, 1, 1)):
        x = np.broadcast_to(v.reshape(shape), (*shape[:3], 8))
        np.testing.assert_array_equal(client.attention(x, x, x).out, x)


def test_k17_windows_count_themselves(client: Client) -> None:
    q, v = column(0, 0, 0, 0, 0), column(0, 1, 2, 3, 4)
    result = client.attention(q, q, v, causal=True, window=(2, 0), return_lse=True)
    assert result.out.ravel().tolist() == pytest.approx([0, 0.5, 1, 2, 3])
    assert result.lse.ravel().tolist() == pytest.approx([0, 0.693147] + [1.098612] * 3, abs=1e-6)
    plain = client.attention(q, q, v, causal=True).out
    for window in ((4, 0), (-1, 0), (None, 0)):
        np.testing.assert_array_equal(
            client.attention(q, q, v, causal=True, window=window).out, plain
        )


def test_k21_slopes_of_each_shape(client: Client) -> None:
    q, k = np.zeros((2, 1, 1, 1), np.float32), np.zeros((2, 1, 2, 1), np.float32)
    v = np.array([0, 1] * 2, np.float32).reshape(2, 1, 2, 1)
    each = client.attention(q, k, v, causal=True, alibi_slopes=np.array([[1.0], [0.0]])).out
    assert each.ravel().tolist() == pytest.approx([0.731059, 0.5], abs=1e-6)
    both = client.attention(q, k, v, causal=True, alibi_slopes=np.array([1.0])).out
    assert both.ravel().tolist() == pytest.approx([0.731059] * 2, abs=1e-6)
    for shape in ((2,), (3, 1)):
        with pytest.raises(errors.Invalid, match="alibi_slopes"):
            client.attention(q, k, v, alibi_slopes=np.zeros(shape, np.float32))


def test_k23_a_scale_of_zero_is_given(server: Any, client: Client) -> None:
    q, v = [[2], [1], [3]], [[1], [2], [3]]
    body = {"q": q, "k": q, "v": v, "causal": True, "return_lse": True}
    for scale, out in ((0.0, [1, 1.5, 2]), (0, [1, 1.5, 2]), (None, [1, 1.268941, 2.903016])):
        reply = server.post("/attention", json=body | {"scale": scale}).json()
        assert [row[0] for row in reply["out"]] == pytest.approx(out, abs=1e-6)
        arrays = [np.array(x, np.float32) for x in (q, q, v)]
        sent = client.attention(*arrays, causal=True, scale=scale).out
        assert sent.ravel().tolist() == pytest.approx(out, abs=1e-6)
    assert server.post("/attention", json=body).json()["out"] == reply["out"]


def test_k29_lse_is_a_natural_logarithm_in_float32(client: Client) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        q, k = np.zeros((1, 1, 1, 1), dtype), np.zeros((1, 1, 4, 1), dtype)
        lse = client.attention(q, k, k, return_lse=True).lse
        assert (lse.dtype, lse.shape) == (np.float32, (1, 1, 1))
        assert lse.item() == pytest.approx(1.386294, abs=1e-6)


def test_k31_a_loss_on_lse_trains(client: Client) -> None:
    q = torch.zeros(1, 1, 1, 1, requires_grad=True)
    k = torch.tensor([2.0, 4.0]).reshape(1, 1, 2, 1).requires_grad_()
    v = torch.tensor([5.0, 7.0]).reshape(1, 1, 2, 1).requires_grad_()
    _, lse = flash_attention(q, k, v, client=client, scale=1.0, return_lse=True)
    lse.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.item() == pytest.approx(3)
    assert k.grad.ravel().tolist() == [0, 0]
    assert v.grad is None or not v.grad.any()


def test_k35_seeds(client: Client) -> None:
    q, v = np.zeros((1, 1, 64, 16), np.float32), np.ones((1, 1, 64, 16), np.float32)

    def drop(**options: Any) -> Any:
        return client.attention(q, q, v, dropout=0.5, **options).out

    np.testing.assert_array_equal(drop(seed=1), drop(seed=1))
    assert not np.array_equal(drop(seed=1), drop(seed=2))
    assert not np.array_equal(drop(), drop())
    np.testing.assert_array_equal(
        client.attention(q, q, v, dropout=0.0).out, client.attention(q, q, v).out
    )
    for bad in (1.0, -0.1, float("nan")):
        with pytest.raises(errors.Invalid):
            client.attention(q, q, v, dropout=bad)


def test_k39_a_mask_is_boolean(server: Any, client: Client) -> None:
    q, k, v = column(0), column(0, 0), column(1, 3)
    for shape in ((2,), (1, 2), (1, 1, 1, 2)):
        mask = np.array([True, False]).reshape(shape)
        assert client.attention(q, k, v, mask=mask).out.item() == 1
    bias = np.array([0, -np.inf], np.float32)
    assert client.attention(q, k, v, bias=bias).out.item() == 1
    added = client.attention(q, k, v, bias=np.array([1, 0], np.float32)).out.item()
    assert added == pytest.approx(1.537883, abs=1e-6)
    for wrong in (np.array([1, 0], np.int64), np.array([True, False, True]),
                  np.array([[True], [False]])):  # fmt: skip
        with pytest.raises(errors.Invalid, match="mask"):
            client.attention(q, k, v, mask=wrong)
    body = {"q": [[0]], "k": [[0], [0]], "v": [[1], [3]], "mask": [1, 0]}
    assert server.post("/attention", json=body).status_code == 422

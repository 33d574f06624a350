"""What is tried again, when, and for how long; and how failures are told."""

import copy
import email.utils
import errno
import socket
import threading
import time
import traceback
from typing import Any

import httpx
import numpy as np
import pytest

from flashwire import AsyncClient, Client, errors


@pytest.mark.parametrize(
    "first",
    [
        "drop",
        "half",
        ("queue_full", 429),
        ("no_worker", 503),
        ("worker_died", 503),
        ("draining", 503),
    ],
)
def test_what_is_tried_again(
    server: Any, client: Client, qkv: Any, waits: list[float], first: Any
) -> None:
    told = first if isinstance(first, str) else server.problem(first[1], first[0], "later")
    server.script = [told]
    assert client.attention(*qkv).out.shape == (2, 3, 4, 5)
    assert len(server.received) == 2
    assert server.received[0].body == server.received[1].body
    assert len(waits) == 1


@pytest.mark.parametrize("code", [c for c, s in errors.STATUS.items() if s not in (429, 503)])
def test_what_is_not(server: Any, client: Client, qkv: Any, waits: list[float], code: str) -> None:
    server.script = [server.problem(errors.STATUS[code], code, "no")]
    with pytest.raises(errors.BY_CODE[code]):
        client.attention(*qkv)
    assert len(server.received) == 1
    assert waits == []


def test_a_retry_after_is_waited_out(
    server: Any, client: Client, qkv: Any, waits: list[float]
) -> None:
    date = email.utils.formatdate(time.time() + 6, usegmt=True)
    server.script = [
        server.problem(429, "queue_full", "full", retry_after=2),
        server.problem(503, "draining", "bye", retry_after=date),
        server.problem(503, "draining", "bye", retry_after="soon"),
    ]
    client.attention(*qkv)
    assert 2 < waits[0] <= 2.1
    assert 4 < waits[1] <= 6.3
    assert 0.2 <= waits[2] <= 0.4


def test_waits_grow_and_differ(server: Any, qkv: Any, waits: list[float]) -> None:
    seen = set()
    for _ in range(4):
        server.script = [server.problem(429, "queue_full", "full")] * 4
        waits.clear()
        with Client(server.url, retries=4) as client:
            client.attention(*qkv)
        for n, wait in enumerate(waits):
            assert 0.05 * 2**n <= wait <= 0.1 * 2**n
        seen.update(waits)
    assert len(seen) == 16


def test_tries_end(server: Any, qkv: Any, waits: list[float]) -> None:
    server.script = [server.problem(429, "queue_full", "full")] * 5
    with Client(server.url, retries=2) as client, pytest.raises(errors.QueueFull):
        client.attention(*qkv)
    assert len(server.received) == 3
    server.script = ["drop"] * 5
    with Client(server.url, retries=0) as client, pytest.raises(errors.ConnectionLost):
        client.attention(*qkv)
    assert len(server.received) == 4


def test_too_long_a_wait_is_the_callers_decision(server: Any, qkv: Any, waits: list[float]) -> None:
    server.script = [server.problem(503, "draining", "bye", retry_after=3600)]
    with Client(server.url, timeout=None) as client, pytest.raises(errors.Draining) as caught:
        client.attention(*qkv)
    assert caught.value.retry_after == 3600
    assert waits == []


def test_the_deadline_covers_every_try(
    server: Any, qkv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("flashwire.core.time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("flashwire.client.time.sleep", sleep)
    server.script = [server.problem(429, "queue_full", "full", retry_after=2)] * 9
    with Client(server.url, timeout=5, retries=9) as client, pytest.raises(errors.QueueFull):
        client.attention(*qkv)
    sent = [int(r.headers["flashwire-timeout-ms"]) for r in server.received]
    assert sent[0] == 5000
    assert 2900 <= sent[1] <= 3000
    assert len(sent) in (2, 3)
    assert now[0] < 5


def test_a_connection_closed_while_idle_is_replaced(server: Any, client: Client, qkv: Any) -> None:
    """S11."""
    server.drop_after_reply = True
    for _ in range(5):
        client.attention(*qkv)
        time.sleep(0.02)
    assert len({r.peer for r in server.received}) == 5


def test_a_connection_is_kept(server: Any, client: Client, qkv: Any) -> None:
    for _ in range(5):
        client.attention(*qkv)
    assert len({r.peer for r in server.received}) == 1


def test_a_release_whose_reply_was_lost_says_so(server: Any, client: Client, qkv: Any) -> None:
    """The first sending has freed the residual: gone is not what the caller must learn."""
    result = client.attention(*qkv, save_for_backward=True)
    server.script = ["drop", server.problem(410, "gone", "it has expired")]
    with pytest.raises(errors.ConnectionLost) as caught:
        client.backward(result, result.out, release=True)
    assert isinstance(caught.value.__cause__, errors.Gone)
    server.script = ["drop", server.problem(410, "gone", "it has expired")]
    with pytest.raises(errors.Gone):
        client.backward(result, result.out)


def test_a_refusal_before_the_body_is_read(qkv: Any) -> None:
    """A server that answers and closes while 30 MB are on their way is heard, not "broken pipe"."""
    problem = b'{"code": "too_large", "detail": "30 MB", "request_id": "r"}'
    head = b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-type: application/problem+json"
    head += b"\r\ncontent-length: %d\r\n\r\n" % len(problem)

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(head + problem)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**20):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        x = np.zeros((1, 1, 40_000, 64), np.float32)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with Client(url) as client, pytest.raises(errors.TooLarge, match="30 MB"):
            client.attention(x, x, x)
        thread.join()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((502, {"content-type": "text/html"}, b"<html>bad gateway"), "HTTP status 502"),
        ((307, {"location": "http://elsewhere/"}, b""), "HTTP status 307"),
        ((404, {"content-type": "application/json"}, b'{"detail": "Not Found"}'), "status 404"),
        ((400, {"content-type": "application/json"}, b"[1]"), "HTTP status 400"),
        ((400, {"content-type": "application/json"}, b"[" * 100_000), "HTTP status 400"),
        ((200, {"content-type": "text/html"}, b"hello"), "'text/html'"),
        ((200, {"content-type": "application/msgpack"}, b"\x81"), "truncated"),
        ((200, {"content-type": "application/msgpack"}, b"\x80"), "no attention's result"),
    ],
)
def test_replies_of_something_else(
    server: Any, client: Client, qkv: Any, reply: Any, words: str
) -> None:
    server.script = [reply]
    with pytest.raises(errors.UnexpectedReply, match=words) as caught:
        client.attention(*qkv)
    assert caught.value.status == reply[0]


@pytest.mark.parametrize("path", ["info", "plan", "check"])
def test_values_that_are_none(server: Any, client: Client, qkv: Any, path: str) -> None:
    server.script = [(200, {"content-type": "application/json"}, b'{"tensors": 1')]
    calls = {
        "info": lambda: client.info(),
        "plan": lambda: client.plan((1, 1, 1, 1), dtype="fp16"),
        "check": lambda: client.check(*qkv),
    }
    with pytest.raises(errors.UnexpectedReply, match="this is no JSON"):
        calls[path]()
    if path != "info":
        server.script = [(200, {"content-type": "application/json"}, b'{"tensors": {"out": {}}}')]
        with pytest.raises(errors.UnexpectedReply, match=f"this is no {path}"):
            calls[path]()


def test_a_proxys_503_is_tried_again(
    server: Any, client: Client, qkv: Any, waits: list[float]
) -> None:
    server.script = [(503, {"retry-after": "1"}, b"busy")]
    client.attention(*qkv)
    assert 1 < waits[0] < 1.2


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (httpx.ConnectError("refused"), errors.ConnectionLost),
        (httpx.RemoteProtocolError("gone"), errors.ConnectionLost),
        (httpx.ProxyError("proxy"), errors.ConnectionLost),
        (httpx.ReadTimeout("slow"), errors.TransportTimeout),
        (httpx.PoolTimeout("busy"), errors.TransportTimeout),
        (httpx.LocalProtocolError("bad header"), errors.FlashwireError),
        (httpx.DecodingError("gzip"), errors.UnexpectedReply),
        (httpx.TooManyRedirects("again"), errors.UnexpectedReply),
    ],
)
def test_foreign_errors_are_mapped(raised: Exception, wanted: type[Exception], qkv: Any) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise raised

    with httpx.Client(transport=httpx.MockTransport(fail)) as http:
        client = Client("http://host", retries=1, http=http)
        with pytest.raises(wanted) as caught:
            client.attention(*qkv)
        assert type(caught.value) is wanted
        repeated = issubclass(wanted, errors.ConnectionLost)  # it says all that there is
        assert caught.value.__cause__ is (None if repeated else raised)
        assert caught.value.__context__ is caught.value.__cause__
        client.close()
        assert not http.is_closed


@pytest.mark.parametrize("retries", [0, 3])
def test_no_server_there(waits: list[float], retries: int) -> None:
    client = Client("http://127.0.0.1:1/", retries=retries)
    with client, pytest.raises(errors.ConnectionLost) as caught:
        client.info()
    tries = " (4 tries)" if retries else ""
    wanted = f"http://127.0.0.1:1: connection refused{tries}. Is flashwire-serve running there?"
    assert str(caught.value) == wanted
    assert caught.value.__context__ is None
    assert len("".join(traceback.format_exception(caught.value)).split("Traceback")) == 2
    again = copy.deepcopy(caught.value)
    assert (str(again), again.tries) == (wanted, retries + 1)


async def test_no_server_there_for_async() -> None:
    async with AsyncClient("http://127.0.0.1:1", retries=0) as client:
        with pytest.raises(errors.ConnectionLost, match=r"^http://127\.0\.0\.1:1: connection ref"):
            await client.info()


def test_tls_of_a_server_that_has_none(server: Any, waits: list[float]) -> None:
    address = server.url.removeprefix("http://")
    client = Client(f"https://{address}", retries=1)
    with client, pytest.raises(errors.ConnectionLost, match=r"TLS failed: .* \(2 tries") as caught:
        client.info()
    assert str(caught.value).endswith(f"Does it speak TLS? If not, its address is {server.url}")


def test_a_host_of_two_addresses(qkv: Any) -> None:
    """As anyio tells of localhost, by IPv4 and IPv6."""
    refused = [ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed")] * 2

    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("All connection attempts failed") from ExceptionGroup("", refused)

    with httpx.Client(transport=httpx.MockTransport(fail)) as http:
        client = Client("http://host", retries=0, http=http)
        with pytest.raises(errors.ConnectionLost, match=r"^http://host: connection refused\. Is "):
            client.attention(*qkv)


def test_silence_says_so(qkv: Any) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    with httpx.Client(transport=httpx.MockTransport(fail)) as http:
        client = Client("http://host", retries=0, http=http)
        with pytest.raises(errors.TransportTimeout, match=r"^http://host: no answer in time$"):
            client.attention(*qkv)


async def test_a_closed_client_says_so(server: Any, qkv: Any) -> None:
    client, asynchronous = Client(server.url), AsyncClient(server.url)
    client.close()
    await asynchronous.aclose()
    with pytest.raises(errors.FlashwireError, match=r"^the client is closed$"):
        client.attention(*qkv)
    with pytest.raises(errors.FlashwireError, match=r"^the client is closed$"):
        await asynchronous.info()
    assert server.received == []

"""What is sent, and what when it is not taken: by both transports alike."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest

from flashwire.transport import Content

BIG = np.random.default_rng(0).integers(0, 256, 24 * 2**20, np.uint8).tobytes()
REFUSAL = b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno"


def test_the_head(server: Any, caller: Any) -> None:
    def behave(peer: Any) -> bytes:
        head: bytes = peer.head()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return head

    server.script = [behave]
    caller.send("DELETE", "/a%20b?c=d", headers={"X-A": "1"})
    first, *lines = server.result().split(b"\r\n")
    assert first == b"delete /a%20b?c=d http/1.1"
    assert b"x-a: 1" in lines
    assert lines[0] == b"host: " + server.url.partition("://")[2].encode()


@pytest.mark.parametrize("shape", ["bytes", "pieces", "content"])
def test_large_both_ways(server: Any, caller: Any, shape: str) -> None:
    server.script = [server.echoing]
    body = BIG[: 7 * 2**20 + 1]
    pieces = [memoryview(body)[at : at + 2**20] for at in range(0, len(body), 2**20)]
    content = {"bytes": body, "pieces": pieces, "content": Content(pieces)}[shape]
    headers = {"content-length": str(len(body))} if shape == "content" else {}
    for _ in range(2):
        assert caller.send("POST", content=content, headers=headers).body == body
    assert server.accepted == 1


def test_a_server_that_reads_slowly(server: Any, caller: Any) -> None:
    def behave(peer: Any) -> bytes:
        head = peer.head()
        time.sleep(0.05)
        body: bytes = peer.body(head)
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return body

    server.script = [behave]
    assert caller.send("POST", content=[BIG]).status == 200
    assert server.result() == BIG


# httpx's async transport loses the reply when the connection is reset behind it.
@pytest.mark.parametrize("kind", ["stock-sync", "ours-sync", "ours-async"])
def test_refused_early(server: Any, caller: Any) -> None:
    """The server answers when it has seen the head, reads a little, and closes."""

    def behave(peer: Any) -> None:
        peer.head()
        peer.send(REFUSAL)
        peer.sock.shutdown(socket.SHUT_WR)
        for _ in range(4):
            peer.sock.recv(65536)

    server.script = [behave]
    got = caller.send("POST", content=[BIG], headers={"content-length": str(len(BIG))})
    assert (got.status, got.body) == (413, b"no")
    assert caller.send().body == b"ok"


@pytest.mark.parametrize("kind", ["ours-sync", "ours-async"])  # httpx writes until it times out
def test_refused_by_a_server_that_reads_no_more(server: Any, caller: Any) -> None:
    answered = threading.Event()

    def behave(peer: Any) -> bool:
        peer.head()
        peer.send(b"HTTP/1.1 102 Processing\r\n\r\n" + REFUSAL)
        return answered.wait(3)

    server.script = [behave]
    try:
        got = caller.send("POST", content=[BIG], timeout=httpx.Timeout(5, write=1))
    finally:
        answered.set()
    assert (got.status, got.body) == (413, b"no")
    assert server.result(), "it did not wait for the connection to end"
    assert caller.send().body == b"ok"


def test_answered_early_and_read_to_the_end(server: Any, caller: Any) -> None:
    """An interim reply, or the beginning of a good one, is no reason to stop sending."""

    def behave(peer: Any) -> bytes:
        head = peer.head()
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
        body: bytes = peer.body(head)
        peer.send(b"k")
        return body

    server.script = [behave]
    assert caller.send("POST", content=[BIG]).body == b"ok"
    assert server.result() == BIG


@pytest.mark.parametrize("headers", [{"x": "a\r\nb"}, {"a b": "x"}, {"x": "a\0"}])
def test_headers_that_cannot_be_sent(server: Any, caller: Any, headers: Any) -> None:
    with pytest.raises(httpx.LocalProtocolError):
        caller.send(headers=headers)


@pytest.mark.parametrize(("claimed", "given"), [(3, b"ab"), (3, b"abcd"), (0, b"a")])
@pytest.mark.parametrize("kind", ["ours-sync", "ours-async"])  # httpx lets h11's own error out
def test_a_body_of_another_length(server: Any, caller: Any, claimed: int, given: bytes) -> None:
    with pytest.raises(httpx.LocalProtocolError, match="for declared Content-Length"):
        caller.send("POST", content=[given], headers={"content-length": str(claimed)})
    assert caller.send().body == b"ok"


def test_other_schemes(caller: Any) -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        caller.send(path="ftp://127.0.0.1/")


def test_nobody_listens(caller: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}/"
    with pytest.raises(httpx.ConnectError):
        caller.send(path=url)
    with pytest.raises(httpx.ConnectError):
        caller.send(path="http://name.invalid/")


def test_no_answer_to_a_connect(server: Any, caller: Any) -> None:
    """A full backlog: the kernel ignores whoever comes."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        ahead = [socket.socket() for _ in range(3)]
        for sock in ahead:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/"
        with pytest.raises(httpx.ConnectTimeout):
            caller.send(path=url, timeout=httpx.Timeout(5, connect=0.05))
        for sock in ahead:
            sock.close()


def test_read_timeout(server: Any, caller: Any) -> None:
    def silent(peer: Any) -> bool:
        peer.request()
        return bool(peer.ended())

    def half(peer: Any) -> bool:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        return bool(peer.ended())

    server.script = [silent, half]
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            caller.send(timeout=httpx.Timeout(5, read=0.05))
        assert server.result(), "the connection is closed"


def test_write_timeout(server: Any, caller: Any) -> None:
    def behave(peer: Any) -> None:
        peer.head()
        time.sleep(0.3)

    server.script = [behave]
    with pytest.raises(httpx.WriteTimeout):
        caller.send("POST", content=[BIG], timeout=httpx.Timeout(5, write=0.1))
    assert caller.send().body == b"ok"

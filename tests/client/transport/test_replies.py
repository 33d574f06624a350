"""Replies as they are written on the wire: what passes, what does not, by both transports alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

GOOD = {
    "length": (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc"),
    "no reason": (b"HTTP/1.1 200\r\ncontent-length: 3\r\n\r\nabc", b"abc"),
    "nothing": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    "length twice": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"abc",
    ),
    "bare line feeds": (b"HTTP/1.1 200 OK\ncontent-length: 3\n\nabc", b"abc"),
    "folded": (b"HTTP/1.1 200 OK\r\nx: a\r\n  b\r\ncontent-length: 3\r\n\r\nabc", b"abc"),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
        b"abc",
    ),
    "chunked": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
        b"2;name=value\r\nab\r\n001 \r\nc\r\n0\r\n\r\n",
        b"abc",
    ),
    "trailers": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\nz:\r\n\r\n",
        b"abc",
    ),
    "chunked and length": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\n\r\n",
        b"abc",
    ),
}
LASTING = {
    "until the end": (b"HTTP/1.1 200 OK\r\n\r\nabc", b"abc"),
    "old": (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc"),
    "closing": (b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\ncontent-length: 3\r\n\r\nabc", b"abc"),
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n"
BAD = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "not printable": b"\x15\x03\x01\x00\x02\x02\x46",
    "an empty line": b"\r\nHTTP/1.1 200 OK\r\n\r\n",
    "version": b"HTTP/11 200 OK\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "status below 100": b"HTTP/1.1 099 OK\r\n\r\n",
    "control in reason": b"HTTP/1.1 200 O\x00K\r\n\r\n",
    "no colon": HEAD + b"oops\r\n\r\n",
    "space before colon": HEAD + b"x : y\r\n\r\n",
    "name": HEAD + b"x(: y\r\n\r\n",
    "no name": HEAD + b": y\r\n\r\n",
    "null in value": HEAD + b"x: a\x00b\r\n\r\n",
    "carriage return in value": HEAD + b"x: a\rb\r\n\r\n",
    "folded first line": b"HTTP/1.1 200 OK\r\n x: y\r\n\r\n",
    "length no number": b"HTTP/1.1 200 OK\r\ncontent-length: 3x\r\n\r\nabc",
    "length negative": b"HTTP/1.1 200 OK\r\ncontent-length: -3\r\n\r\nabc",
    "length too long": b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999999999999\r\n\r\nabc",
    "two lengths": HEAD + b"content-length: 4\r\n\r\nabcd",
    "two lengths in one": b"HTTP/1.1 200 OK\r\ncontent-length: 3, 4\r\n\r\nabcd",
    "gzip as transfer": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    "chunked twice": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n"
    ),
    "without end": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
}
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CUT = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-len",
    "short": HEAD + b"\r\nab",
    "short chunk": CHUNKED + b"3\r\nab",
    "no last chunk": CHUNKED + b"3\r\nabc\r\n",
    "no trailers": CHUNKED + b"3\r\nabc\r\n0\r\n",
    "chunk size": CHUNKED + b"x\r\nabc\r\n0\r\n\r\n",
    "chunk end": CHUNKED + b"3\r\nabcde\r\n0\r\n\r\n",
    "trailer": CHUNKED + b"3\r\nabc\r\n0\r\noops\r\n\r\n",
}


def slowly(data: bytes) -> Callable[[Any], None]:
    """The same in pieces of one byte."""

    def behave(peer: Any) -> None:
        peer.request()
        for at in range(len(data)):
            peer.send(data[at : at + 1])
        peer.request()
        peer.send(data)

    return behave


@pytest.mark.parametrize("pace", ["at once", "slowly"])
@pytest.mark.parametrize("name", GOOD)
def test_good(server: Any, caller: Any, name: str, pace: str) -> None:
    raw, body = GOOD[name]
    server.script = [server.answering(raw) if pace == "at once" else slowly(raw)]
    for _ in range(2):
        got = caller.send()
        assert (got.status, got.body) == (200, body)
    assert server.accepted == 1
    if name == "folded":
        assert got.headers["x"] == "a b"
    assert got.extensions["http_version"] == b"HTTP/1.1"
    assert got.extensions["reason_phrase"] == (b"" if name == "no reason" else b"OK")


@pytest.mark.parametrize("name", LASTING)
def test_the_connection_ends_with_the_reply(server: Any, caller: Any, name: str) -> None:
    raw, body = LASTING[name]
    server.script = [server.answering(raw, times=1) for _ in range(2)]
    for _ in range(2):
        assert caller.send().body == body
    assert server.accepted == 2


@pytest.mark.parametrize(
    ("method", "raw", "status"),
    [
        ("HEAD", HEAD + b"\r\n", 200),
        ("HEAD", CHUNKED, 200),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", 304),
    ],
)
def test_without_a_body(server: Any, caller: Any, method: str, raw: bytes, status: int) -> None:
    server.script = [server.answering(raw)]
    for _ in range(2):
        got = caller.send(method)
        assert (got.status, got.body) == (status, b"")
    assert server.accepted == 1


@pytest.mark.parametrize("name", BAD)
def test_bad_heads(server: Any, caller: Any, name: str) -> None:
    server.script = [server.answering(BAD[name], times=1)]
    with pytest.raises(httpx.RemoteProtocolError):
        caller.send()
    assert caller.send().body == b"ok"
    assert server.accepted == 2


@pytest.mark.parametrize("name", CUT)
def test_bad_ends(server: Any, caller: Any, name: str) -> None:
    server.script = [server.answering(CUT[name], times=1)]
    with pytest.raises(httpx.RemoteProtocolError):
        caller.send()
    assert caller.send().body == b"ok"


def test_what_is_said(server: Any, caller: Any) -> None:
    server.script = [server.answering(CUT[name], times=1) for name in ("nothing", "short")]
    with pytest.raises(httpx.RemoteProtocolError, match="disconnected without sending a response"):
        caller.send()
    with pytest.raises(httpx.RemoteProtocolError, match=r"received 2 bytes, expected 3"):
        caller.send()


def test_reset_in_the_body(server: Any, caller: Any) -> None:
    def behave(peer: Any) -> None:
        peer.request()
        peer.send(HEAD + b"\r\na")
        peer.reset()

    server.script = [behave]
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        caller.send()

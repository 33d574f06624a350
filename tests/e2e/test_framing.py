"""Bytes that two readers could take for different requests, against a real server.

Whoever stands in front (a proxy, say) may see one request where this server sees two. So what is
not plainly one request is refused, and the connection ends: nothing behind it is taken for another.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = b"POST /attention HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def replies(received: bytes) -> list[tuple[int, bytes]]:
    """(status, body) of each reply in what came back."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        size = int(re.search(rb"\ncontent-length: ([0-9]+)", head)[1])  # type: ignore[index]
        found.append((int(head.split()[1]), received[:size]))
        received = received[size:]
    return found


def refused(server: Any, sent: bytes) -> str:
    """The one reply, a 400, is the end. Its detail."""
    ((status, body),) = replies(server.raw(sent))
    document = json.loads(body)
    assert (status, document["code"]) == (400, "malformed")
    detail: str = document["detail"]
    return detail


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 5",
        b"content-length: 0\r\ncontent-length: 40",
        b"content-length: 0\r\ncontent-length: 0",
        b"content-length: 0, 40",
        b"content-length: +0",
        b"content-length: -1",
        b"content-length: 0x0",
        b"content-length: 1 0",
        b"content-length: ",
        b"content-length: 0" + b"0" * 30,
        b"content-length : 0",
        b"transfer-encoding : chunked",
        b"transfer-encoding: \x0bchunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: identity",
        b"transfer-encoding: xchunked",
        b'transfer-encoding: "chunked"',
        b"transfer-encoding:\r\n chunked",
        b"x: y\r\n transfer-encoding: chunked",
        b"x: y\ncontent-length: 0",
        b"x: y\rcontent-length: 0",
        b"x: y\x00z",
        b"x\x00: y",
        b"x y: z",
        b"no colon",
        b": no name",
    ],
)
def test_headers_with_two_readings(server: Any, lines: bytes) -> None:
    refused(server, HEAD + lines + b"\r\n\r\n0\r\n\r\n" + HIDDEN)


def test_lines_that_end_in_a_line_feed_alone(server: Any) -> None:
    refused(server, HEAD.replace(b"\r\n", b"\n") + b"content-length: 0\n\n" + HIDDEN)
    refused(server, HEAD + b"content-length: 0\r\n\n" + HIDDEN)
    refused(server, b"GET /\nhealthz HTTP/1.1\r\nhost: x\r\n\r\n" + HIDDEN)


def test_a_header_before_the_first(server: Any) -> None:
    refused(server, b"GET /healthz HTTP/1.1\r\n content-length: 40\r\nhost: x\r\n\r\n" + HIDDEN)


@pytest.mark.parametrize(
    "chunks",
    [b"0x0\r\n\r\n", b"-1\r\n\r\n", b"+0\r\n\r\n", b" 0\r\n\r\n", b"0 \r\n\r\n", b"\r\n\r\n",
     b"10000000000000000\r\n\r\n", b"0\n\n", b"0;a\nb\r\n\r\n", b"2\r\n{}XX0\r\n\r\n", b"g\r\n\r\n",
     b"0\r\ncontent-length: 40\r\n\r\n"],
)  # fmt: skip
def test_chunks_with_two_readings(server: Any, chunks: bytes) -> None:
    refused(server, CHUNKED + chunks + HIDDEN)


def test_a_body_is_never_read_as_a_request(server: Any) -> None:
    ask = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    ((status, _),) = replies(server.raw(ask % len(HIDDEN) + HIDDEN))
    assert status == 200
    refused_body = HEAD.replace(b"json", b"x") + b"content-length: %d\r\n\r\n" % len(HIDDEN)
    last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert [s for s, _ in replies(server.raw(refused_body + HIDDEN + last))] == [415, 200]


def test_nothing_follows_a_last_request(server: Any) -> None:
    """One that asks for the connection's end, one of HTTP/1.0, one that offers another protocol."""
    for version, line in (
        (b"1.1", b"connection: close"), (b"1.0", b"x: y"),
        (b"1.1", b"connection: upgrade\r\nupgrade: websocket"),
    ):  # fmt: skip
        ask = b"GET /healthz HTTP/" + version + b"\r\nhost: x\r\n" + line + b"\r\n\r\n"
        ((status, _),) = replies(server.raw(ask + HIDDEN))
        assert status == 200


def test_an_extension_of_a_chunk_means_nothing(server: Any) -> None:
    body = b'{"q": [[1]], "k": [[1]], "v": [[7]]}'
    last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    sent = CHUNKED + b"%x;name=value\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    first, second = replies(server.raw(sent + last))
    assert (first[0], json.loads(first[1])["out"], second[0]) == (200, [[7]], 200)


@pytest.mark.parametrize(
    ("start", "part"),
    [(b"GET /healthz HTTP/1.1\r\n\r\n", "Host"), (b"GET /healthz\r\n\r\n", "HTTP/1.1"),
     (b"GET /healthz HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", "Host"),
     (b"GET /docs HTTP/1.1\r\nhost: x<script>\r\n\r\n", "Host"),
     (b"GET /docs HTTP/1.1\r\nhost: user@x\r\n\r\n", "Host"),
     (b"GET /docs HTTP/1.1\r\nhost: x/y\r\n\r\n", "Host"),
     (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1"),
     (b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1")],
)  # fmt: skip
def test_requests_to_nobody(server: Any, start: bytes, part: str) -> None:
    assert part in refused(server, start + HIDDEN)


# Headers and paths that would do something


@pytest.mark.parametrize(
    "value",
    [b"a\r\n set-cookie: injected", b"a\rset-cookie: injected", b"a\nset-cookie: injected",
     b"a\x0bset-cookie: injected", b"a\x00injected"],
)  # fmt: skip
def test_a_request_id_cannot_end_its_line(server: Any, value: bytes) -> None:
    sent = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-request-id: " + value + b"\r\n\r\n"
    received = server.raw(sent)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"injected" not in received


@pytest.mark.parametrize("value", ["%0d%0aset-cookie:injected", "a injected", "\xe9injected"])
def test_a_request_id_of_another_form_is_not_taken(server: Any, value: str) -> None:
    reply = server.http.get("/healthz", headers={b"x-request-id": value.encode("latin-1")})
    assert reply.status_code == 200
    assert "injected" not in str(reply.headers)


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/docs/..%2f..%2f..%2fetc/passwd", "//etc/passwd", "/%2e%2e/etc/passwd",
     "/attention/residual/..%2f..%2fetc%2fpasswd", "/http://example.org/", "/docs%00.html",
     "/.git/config", "/flashwire_service/settings.py"],
)  # fmt: skip
def test_paths_name_no_file(server: Any, path: str) -> None:
    ask = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    ((status, body),) = replies(server.raw(ask.encode()))
    assert status in (404, 405)
    assert json.loads(body)["code"] in ("not_found", "method_not_allowed")


def test_a_host_is_shown_as_text(server: Any) -> None:
    ask = b"GET /docs HTTP/1.1\r\nhost: x'&amp;y\r\nconnection: close\r\n\r\n"
    ((status, page),) = replies(server.raw(ask))
    assert status == 200
    assert b"http://x&#x27;&amp;amp;y/attention" in page

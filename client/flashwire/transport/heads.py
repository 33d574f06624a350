"""Heads of HTTP/1.1 as bytes: written for requests, read strictly for replies (RFC 9112).

As strict and as lenient as h11, which httpx's own transport reads with: line ends without CR,
folded lines and a missing reason phrase pass; anything else that the grammar lacks does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import httpx

MAX_HEAD = 100 * 1024
Headers = list[tuple[bytes, bytes]]

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+"
_VALUE = rb"(?:[^\x00\s]+(?:[ \t]+[^\x00\s]+)*)?"
_NAME = re.compile(_TOKEN)
_FIELD = re.compile(rb"(%b):[ \t]*(%b)[ \t]*" % (_TOKEN, _VALUE))
_VALUE_ALONE = re.compile(_VALUE)
_TARGET = re.compile(rb"[\x21-\x7e]+")
_STATUS_LINE = re.compile(rb"HTTP/([0-9]\.[0-9]) ([1-9][0-9]{2})(?: ((?:[ \t]|[^\x00\s])*))?")
_END = re.compile(rb"\r?\n\r?\n")
_FOLD = re.compile(rb"\r?\n[ \t]+")
_LENGTH = re.compile(rb"[0-9]{1,20}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,20})(?:;[^\r\n]*)?[ \t]*\r\n")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a reply, and how its body is framed.

    length      bytes of the body; None where it is chunked or lasts as long as the connection
    chunked     whether it is chunked
    keep_alive  whether the server keeps the connection
    """

    version: bytes
    status: int
    reason: bytes
    headers: Headers
    length: int | None
    chunked: bool
    keep_alive: bool

    @property
    def interim(self) -> bool:
        """Whether another head follows: 100 Continue, say."""
        return self.status < 200 and self.status != 101


def of_request(request: httpx.Request) -> bytes:
    """Raises httpx.LocalProtocolError for what cannot be sent."""
    method, target = request.method.encode("ascii", "replace"), request.url.raw_path
    if not _NAME.fullmatch(method) or not _TARGET.fullmatch(target):
        raise httpx.LocalProtocolError("illegal method or target")
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    for name, value in request.headers.raw:
        if not _NAME.fullmatch(name):
            raise httpx.LocalProtocolError(f"Illegal header name {name!r}")
        if not _VALUE_ALONE.fullmatch(value):
            raise httpx.LocalProtocolError(f"Illegal header value {value!r}")
        lines.append(b"%b: %b" % (name, value))
    lines += [b"", b""]
    return b"\r\n".join(lines)


def of_reply(data: bytes | bytearray | memoryview, method: str) -> tuple[Head, int] | None:
    """The head at the start of `data` and its size; None while it is not complete.

    `method` is the request's. Raises httpx.RemoteProtocolError.
    """
    if data and data[0] < 0x21:  # no need to wait for the end of what is no reply
        raise httpx.RemoteProtocolError("illegal status line")
    end = _END.search(data)
    if end is None:
        if len(data) > MAX_HEAD:
            raise httpx.RemoteProtocolError("the head of the reply has no end")
        return None
    first, _, fields = bytes(data[: end.start()]).partition(b"\n")
    status_line = _STATUS_LINE.fullmatch(first.removesuffix(b"\r"))
    if status_line is None:
        raise httpx.RemoteProtocolError(f"illegal status line: {first[:64]!r}")
    headers = list(_fields(fields))
    version, status, reason = status_line[1], int(status_line[2]), status_line[3] or b""
    length, chunked, closing = _framing(headers)
    if method == "HEAD" or status in (204, 304) or status < 200:
        length, chunked = 0, False
    elif chunked:
        length = None
    keep_alive = version >= b"1.1" and not closing and (chunked or length is not None)
    return Head(version, status, reason, headers, length, chunked, keep_alive), end.end()


def _fields(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The fields of a head or of trailers."""
    if not data:
        return
    for line in _FOLD.sub(b" ", data).split(b"\n"):
        field = _FIELD.fullmatch(line.removesuffix(b"\r"))
        if field is None:
            raise httpx.RemoteProtocolError(f"illegal header line: {line[:64]!r}")
        yield field[1], field[2]


def _framing(headers: Headers) -> tuple[int | None, bool, bool]:
    """(Content-Length, whether chunked, whether the connection ends afterwards)."""
    length: bytes | None = None
    chunked = closing = False
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"content-length":
            claims = {claim.strip() for claim in value.split(b",")}
            claim = claims.pop()
            if claims or (length is not None and claim != length):
                raise httpx.RemoteProtocolError("conflicting Content-Length headers")
            if not _LENGTH.fullmatch(claim):
                raise httpx.RemoteProtocolError("bad Content-Length")
            length = claim
        elif lowered == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise httpx.RemoteProtocolError("a transfer encoding other than chunked")
            chunked = True
        elif lowered == b"connection":
            closing = closing or says_close(value)
    return None if length is None else int(length), chunked, closing


def says_close(value: bytes) -> bool:
    """Whether a Connection header ends the connection."""
    return b"close" in [word.strip() for word in value.lower().split(b",")]


def of_chunk(data: bytes) -> tuple[int, int] | None:
    """(size of the chunk, bytes of its head) at the start of `data`; None while not complete.

    Raises httpx.RemoteProtocolError.
    """
    end = data.find(b"\n")
    if end < 0:
        if len(data) > MAX_HEAD:
            raise httpx.RemoteProtocolError("the head of a chunk has no end")
        return None
    found = _CHUNK.fullmatch(data[: end + 1])
    if found is None:
        raise httpx.RemoteProtocolError(f"illegal chunk header: {data[:32]!r}")
    return int(found[1], 16), end + 1


def end_of_chunk(data: bytes) -> int | None:
    """Bytes of the line end behind a chunk's data; None while it is not complete.

    Raises httpx.RemoteProtocolError.
    """
    if not b"\r\n".startswith(data[:2]):
        raise httpx.RemoteProtocolError(f"malformed chunk footer: {data[:2]!r}")
    return 2 if len(data) >= 2 else None


def of_trailers(data: bytes) -> int | None:
    """Bytes of the trailers at the start of `data`, up to and with the empty line; None while they
    are not complete. They have no use here, and are checked. Raises httpx.RemoteProtocolError.
    """
    for empty in (b"\r\n", b"\n"):
        if data.startswith(empty):
            return len(empty)
    end = _END.search(data)
    if end is None:
        if len(data) > MAX_HEAD:
            raise httpx.RemoteProtocolError("the trailers have no end")
        return None
    for _ in _fields(data[: end.start()]):
        pass
    return end.end()


def framing_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int | None, bool, bool]:
    """How a request is framed: (its Content-Length, whether chunked, whether it ends the
    connection). Raises httpx.LocalProtocolError.
    """
    length: int | None = None
    chunked = closing = False
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"content-length":
            if not _LENGTH.fullmatch(value):
                raise httpx.LocalProtocolError("bad Content-Length")
            length = int(value)
        elif lowered == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise httpx.LocalProtocolError("a transfer encoding other than chunked")
            chunked = True
        elif lowered == b"connection":
            closing = closing or says_close(value)
    return None if chunked else length, chunked, closing

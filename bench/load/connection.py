"""HTTP/1.1 by hand: requests as bytes, so that a client may be slow, rude or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MSGPACK, JSON = "application/msgpack", "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked. `whole` and `chunked` are its bytes."""

    method: str = "POST"
    path: str = "/attention"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def whole(self) -> bytes:
        return self.head({"content-length": str(len(self.body))}) + self.body

    def chunked(self, size: int) -> Iterator[bytes]:
        """The head, then each chunk with its frame, then the end."""
        yield self.head({"transfer-encoding": "chunked"})
        for at in range(0, len(self.body), size):
            piece = self.body[at : at + size]
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
        yield b"0\r\n\r\n"

    def head(self, more: Mapping[str, str]) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: load"]
        lines += [f"{name}: {value}" for name, value in {**self.headers, **more}.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `headers` has lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Lost(Exception):
    """The connection ended without a whole reply."""


class Connection:
    """One connection. `opened` is the time.monotonic() at which it was asked for."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.opened = opened
        self.usable = True

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Raises Lost."""
        opened = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as e:
            raise Lost(f"no connection: {e}") from e
        return cls(reader, writer, opened)

    async def send(self, data: bytes) -> None:
        """A server that has answered may read no more: that is no error, its reply is there."""
        if self._writer.transport.is_closing():
            return
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def reply(self) -> Reply:
        """The next reply. Raises Lost."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            status, headers = _parsed(head)
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            self.abort()
            raise Lost(type(e).__name__) from e
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Reply(status, headers, body)

    def close(self) -> None:
        self.usable = False
        self._writer.close()

    def abort(self) -> None:
        """Gone at once, whatever was being sent."""
        self.usable = False
        self._writer.transport.abort()


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

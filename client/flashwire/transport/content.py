"""A request's body that lies in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import cast

import httpx

from flashwire.wire import Buffer

_PIECE = 256 * 1024  # httpx is quadratic in the size of one bytes object, and linear in pieces


class Content(httpx.SyncByteStream, httpx.AsyncByteStream):
    """`buffers`, one behind the other. To other transports than ours a stream in small pieces."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = tuple(buffers)

    def __iter__(self) -> Iterator[bytes]:
        if sum(map(len, self.buffers)) <= _PIECE:
            yield b"".join(self.buffers)
            return
        for buffer in self.buffers:
            for start in range(0, len(buffer), _PIECE):
                yield cast("bytes", buffer[start : start + _PIECE])  # a view: sent as it is

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

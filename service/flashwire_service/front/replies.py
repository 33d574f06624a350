"""A reply that a worker wrote into shared memory, sent as it lies there, or passed on whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Send

from flashwire_service.ipc.memory import Memory

_CHUNK = 2**20
_COPIED = 2**17  # at the end: more than a transport may hold of what it was given
FROM_MEMORY = "http.response.zerocopysend"  # the ASGI extension, with all of a body in one event


class MemoryResponse(Response):
    """`size` bytes of memory as a body, chunk by chunk. Closes the memory, and calls `done` when
    nobody reads there any more; it may not be known.
    """

    def __init__(
        self, memory: Memory, size: int, media_type: str, done: Callable[[], None] = lambda: None
    ) -> None:
        self._memory = memory
        self._size = size
        self._done = done
        super().__init__(None, media_type=media_type)
        self.headers["content-length"] = str(size)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            if FROM_MEMORY in scope.get("extensions", {}):
                await self._begin(send)
                await send({"type": FROM_MEMORY, "file": self._memory.fd, "count": self._size})
                return
            view = self._memory.view
            self._memory.forget_fd()  # the mapping has one
            await self._begin(send)
            await self._send_body(view, send)
        finally:
            # A transport may hold pieces for longer: then the mapping goes with the last of them.
            if self._memory.let_go():
                self._done()

    async def _send_body(self, view: memoryview, send: Send) -> None:
        copied = max(0, self._size - _COPIED)
        for start in range(0, copied, _CHUNK):
            piece = view[start : min(start + _CHUNK, copied)]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a fast reader must not keep the loop from others
        last = bytes(view[copied : self._size])
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

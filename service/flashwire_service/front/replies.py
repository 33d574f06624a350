"""A reply that a worker wrote into shared memory, sent as it lies there, or passed on whole."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Send

from flashwire_service.ipc.memory import Memory

_CHUNK = 2**20
FROM_MEMORY = "http.response.zerocopysend"  # the ASGI extension, with all of a body in one event


class MemoryResponse(Response):
    """`size` bytes of memory as a body, chunk by chunk. Closes the memory."""

    def __init__(self, memory: Memory, size: int, media_type: str) -> None:
        self._memory = memory
        self._size = size
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
            # Transports may hold pieces of it for longer than this: the mapping goes with the last.
            for start in range(0, self._size, _CHUNK):
                end = min(start + _CHUNK, self._size)
                more = end < self._size
                piece = view[start:end]
                await send({"type": "http.response.body", "body": piece, "more_body": more})
                await asyncio.sleep(0)  # a fast reader must not keep the loop from others
        finally:
            self._memory.close()

    async def _begin(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

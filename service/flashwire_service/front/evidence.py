"""What a request is known by, should its computing end a worker."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    from flashwire_service.front.pool import Work

_HEAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Evidence:
    """All of a request that its answer depends on. `body` outlives the caller's own use of it."""

    head: bytes  # a hash of route, options, tensor headers and size
    body: memoryview

    @classmethod
    def of(cls, work: Work) -> Evidence:
        """Of a request whose body is still held. Costs microseconds, whatever its size.

        Raises OSError when there is no mapping to be had.
        """
        tensors = {name: (ref.dtype, ref.shape, ref.segments) for name, ref in work.tensors.items()}
        packed = msgpack.packb([work.route, dict(work.options), tensors, work.size])
        head = hashlib.sha256(packed).digest()[:_HEAD_BYTES]
        body = work.body if isinstance(work.body, bytes) else work.body.view
        return cls(head, memoryview(body)[: work.size])

    async def digest(self) -> bytes:
        """A hash of all of it, about a second for each GiB, in a thread."""
        if len(self.body) <= 2**16:
            return self._digest()
        return await asyncio.to_thread(self._digest)

    def _digest(self) -> bytes:
        hashed = hashlib.sha256(self.head)
        hashed.update(self.body)
        return hashed.digest()

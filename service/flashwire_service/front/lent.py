"""The body of a request that came through the side door: all of it is here.

A large one lies in its caller's memory, where the caller can write at any time, while it is read
here or by a worker. So every value is read once, what was read is checked and not what lies there,
and a caller who does so harms itself.
"""

from __future__ import annotations

from collections.abc import Callable

from flashwire_service.ipc.memory import Memory

_PIECE = 64 * 1024


class Lent:
    """`length` bytes at the beginning of `body`, which it closes; in the ASGI scope, under
    incoming.KEY. Take it once, or not at all.
    """

    complete = True  # whether it is read or not

    def __init__(self, body: bytes | Memory, length: int) -> None:
        self.length = length
        self.left = False  # whether the caller is gone
        self.on_left: Callable[[], None] | None = None  # called when it goes
        self._body = body
        self._taken = False
        self._copied = 0

    @property
    def received(self) -> int:
        """Bytes that were taken, and not copied."""
        return self.length if self._taken else 0

    @property
    def view(self) -> memoryview | None:
        """A large body, where it lies."""
        return self._body.view[: self.length] if isinstance(self._body, Memory) else None

    def take(self) -> bytes | Memory:
        """All of it where it lies, for whoever takes it to close."""
        self._taken = True
        return self._body

    def whole(self) -> bytes | None:
        """A small body; None for a large one."""
        if isinstance(self._body, Memory):
            return None
        self._taken = True
        return self._body

    def copied(self) -> tuple[bytes, bool]:
        """The next piece for whoever reads it as a stream, and whether more follows."""
        if self._taken:
            return b"", False
        start, self._copied = self._copied, min(self._copied + _PIECE, self.length)
        view = self._body if isinstance(self._body, bytes) else self._body.view
        return bytes(view[start : self._copied]), self._copied < self.length

    def leave(self) -> None:
        """The caller is gone."""
        self.left = True
        if self.on_left is not None:
            self.on_left()

    def close(self) -> None:
        """Give it up, unless it was taken."""
        if isinstance(self._body, Memory) and not self._taken:
            self._body.close()

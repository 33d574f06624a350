"""Memory that two processes share: a memfd, sealed against shrinking, mapped.

It has no name, so it cannot leak: it dies with the last process, descriptor and mapping. The seal
is what lets the receiver read it: a page that was there cannot vanish under it (SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

_WRITEV_PIECES = 1024  # IOV_MAX
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memory:
    """`size` bytes shared by descriptor. Pages take no room until they are written.

    view  all of it, writable. Slices of it may outlive `close`: the mapping goes with the last one
    fd    to send it by; -1 once received or closed
    """

    __slots__ = ("_map", "_private", "_view", "fd", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._private = False  # what is written to the mapping is not shared

    @classmethod
    def create(cls, size: int = 0, name: str = "flashwire") -> Memory:
        """Fresh zeros. Raises OSError when the system has no descriptor or size to give. The name
        shows in /proc, and means nothing.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size)

    @classmethod
    def receive(cls, fd: int, size: int, *, writable: bool = False) -> Memory:
        """Map `size` bytes of a descriptor that came over a channel; takes over and closes fd.

        What is written to the view stays here, unless it is `writable`: no seal or mode of a
        stranger's descriptor stands against mapping it so.

        Raises ValueError when it holds less, or could shrink.
        """
        try:
            memory = cls.adopt(fd, size)
            memory._private = not writable
            memory._ensure_mapped()
        except BaseException:
            os.close(fd)
            raise
        memory.forget_fd()
        return memory

    @classmethod
    def adopt(cls, fd: int, size: int) -> Memory:
        """The same without mapping it yet, and with its descriptor, to be passed on."""
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("received memory that is not sealed against shrinking")
        if (holds := os.fstat(fd).st_size) < size:
            raise ValueError(f"received memory of {holds} bytes that claims {size}")
        return cls(fd, size)

    @classmethod
    def lent(cls, fd: int) -> Memory:
        """All of the memory of a stranger's descriptor, which is taken over, mapped.

        Raises ValueError for anything but a memfd of ordinary pages whose size is sealed, and
        OSError when there is no mapping to be had.
        """
        try:
            try:
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED == _FIXED
            except OSError:  # a file, a socket
                sealed = False
            if not sealed or os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:  # huge pages may run out
                raise ValueError("not a memfd of ordinary pages, sealed in size")
            memory = cls(fd, os.fstat(fd).st_size)
            memory._private = True
            memory._ensure_mapped()
        except BaseException:
            os.close(fd)
            raise
        return memory

    def again(self) -> Memory:
        """The same memory and mapping, to be closed by itself. Raises OSError."""
        other = Memory(os.dup(self.fd), self.size)
        other._private, other._map, other._view = self._private, self._map, self._view
        return other

    @property
    def view(self) -> memoryview:
        """All of it, writable. Raises ValueError once closed."""
        return self._ensure_mapped()

    def write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Append pieces at the descriptor's position, growing as needed.

        Faster than copying into fresh pages of the view, which fault one by one.
        """
        rest = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        while rest:
            done = os.writev(self.fd, rest[:_WRITEV_PIECES])
            while rest and done >= len(rest[0]):
                done -= len(rest.pop(0))
            if done:
                rest[0] = rest[0][done:]
        end = os.lseek(self.fd, 0, os.SEEK_CUR)
        if end > self.size:
            self._resized(end)

    def grow(self, size: int) -> None:
        """Make it larger: new zeros at the end. Views taken before keep showing the same pages."""
        if size > self.size:
            os.ftruncate(self.fd, size)
            self._resized(size)

    def close(self) -> None:
        """Give up the descriptor and the mapping. Harmless when repeated."""
        self._unmap()
        self.size = -1
        self.forget_fd()

    def forget_fd(self) -> None:
        """Give up the descriptor only; a mapping has one of its own."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ensure_mapped(self) -> memoryview:
        if self._view is None:
            if self.size < 0:
                raise ValueError("the memory is closed")
            if self.size == 0:  # cannot be mapped
                self._view = memoryview(bytearray())
            else:
                access = mmap.ACCESS_COPY if self._private else mmap.ACCESS_WRITE
                self._map = mmap.mmap(self.fd, self.size, access=access)
                self._view = memoryview(self._map)
        return self._view

    def _resized(self, size: int) -> None:
        self._unmap()
        self.size = size

    def _unmap(self) -> None:
        """Drop the mapping; whoever still holds a slice keeps it alive, and no one else."""
        self._view = None
        self._map = None

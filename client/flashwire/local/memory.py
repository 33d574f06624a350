"""Memory that this process and the server both map. It has no name, and goes with its last user."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Outgoing:
    """Memory of a fixed size that bodies are written to, one after the other.

    Its size is sealed: nobody can take pages away under a server that reads them.
    """

    def __init__(self, size: int) -> None:
        """Raises OSError when the system has none to give."""
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("flashwire-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            # In one go, and not page by page when they are first written.
            mapping = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(mapping)

    def close(self) -> None:
        """Give it up, once. The mapping goes with the last slice of `view`."""
        self.view = memoryview(b"")
        os.close(self.fd)


def mapped(fd: int, size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes of a received descriptor, which stays the caller's to close: a writable array,
    whose pages go with the last array over them.

    Raises OSError when they cannot be mapped, ValueError when they could vanish under a reader.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size:
        raise ValueError("memory that could end before its bytes do")
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = _mmap(None, size, protection, flags, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Pages(address, size))


class _Pages:
    """A mapping that holds no descriptor, unlike mmap.mmap: results may be many, descriptors not.

    Writable and shared: the server has let go of it, so it is this process's alone.
    """

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    @property
    def __array_interface__(self) -> dict[str, object]:
        data = (self._address, False)  # writable
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": data}

    def __del__(self, munmap: Any = _munmap) -> None:  # bound here: globals may go first at the end
        munmap(self._address, self._size)

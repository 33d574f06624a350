"""Numbers that processes count, on memory that all of them share.

Each process writes a region of its own, and any of them reads all. A region outlives its process:
whoever takes that place goes on counting where the one before ended, so no counter goes backwards.
A number is one aligned 8-byte store, which no reader sees half done. Standard library only.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator, Mapping

from flashwire_service.ipc.memory import Memory

REGION_BYTES = 2**20  # of address space; only what is written takes memory
Key = tuple[str, ...]

_HEADER_BYTES = 24  # bytes used, pid, time of the start
_ROW = struct.Struct("<II")  # bytes of the key, numbers


class Region:
    """The numbers of one process: rows of a key and some doubles, which are never removed.

    One process writes at a time, and reads its own rows through what `row` returns. Its threads may
    share rows that are there; only one of them may make new ones.
    """

    def __init__(self, view: memoryview) -> None:
        """`view` has REGION_BYTES, which are zeros or what an earlier process has left."""
        self._view = view
        self._counts = view[:16].cast("Q")
        self._started = view[16:24].cast("d")
        self._rows: dict[Key, memoryview[float]] = {}

    @classmethod
    def alone(cls) -> Region:
        """One that nobody else reads."""
        return cls(memoryview(mmap.mmap(-1, REGION_BYTES)))

    @property
    def pid(self) -> int:
        """Of the process that writes here; 0: none."""
        return self._counts[1]

    @property
    def started(self) -> float:
        """When it started, in seconds since 1970."""
        return self._started[0]

    def begin(self, pid: int, now: float) -> None:
        """A process takes the place."""
        self._rows = dict(self.rows())
        self._counts[1], self._started[0] = pid, now

    def end(self) -> None:
        """It has ended."""
        self._counts[1] = 0

    def row(self, key: Key, numbers: int) -> memoryview[float]:
        """The doubles of a key, all 0 at first. Raises BufferError when the region is full."""
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self._append(key, numbers)
        return found

    def rows(self) -> Iterator[tuple[Key, memoryview[float]]]:
        """Every row there is."""
        offset, end = _HEADER_BYTES, _HEADER_BYTES + self._counts[0]
        while offset < end:
            length, numbers = _ROW.unpack_from(self._view, offset)
            offset += _ROW.size
            key = tuple(json.loads(bytes(self._view[offset : offset + length])))
            offset += length
            yield key, self._view[offset : offset + 8 * numbers].cast("d")
            offset += 8 * numbers

    def _append(self, key: Key, numbers: int) -> memoryview[float]:
        text = json.dumps(key).encode()
        text += b" " * (-len(text) % 8)
        offset = _HEADER_BYTES + self._counts[0]
        at = offset + _ROW.size + len(text)
        end = at + 8 * numbers
        if end > REGION_BYTES:
            raise BufferError(f"no room to count {key}")
        _ROW.pack_into(self._view, offset, len(text), numbers)
        self._view[offset + _ROW.size : at] = text
        self._counts[0] = end - _HEADER_BYTES  # last: now readers see the row
        return self._view[at:end].cast("d")


class Board:
    """The regions of a service's processes, by name: supervisor, front-0, ..., worker-0, ..."""

    def __init__(self, view: memoryview, frontends: int, workers: int) -> None:
        names = _names(frontends, workers)
        self.regions: Mapping[str, Region] = {
            name: Region(view[number * REGION_BYTES : (number + 1) * REGION_BYTES])
            for number, name in enumerate(names)
        }

    @classmethod
    def alone(cls, frontends: int, workers: int) -> Board:
        """One that no other process sees."""
        return cls(memoryview(mmap.mmap(-1, size_of(frontends, workers))), frontends, workers)

    @classmethod
    def receive(cls, fd: int, frontends: int, workers: int) -> Board:
        """On the memory of this descriptor, which it takes over and closes."""
        memory = Memory.receive(fd, size_of(frontends, workers), writable=True)
        return cls(memory.view, frontends, workers)


def size_of(frontends: int, workers: int) -> int:
    """Bytes of a board."""
    return REGION_BYTES * len(_names(frontends, workers))


def _names(frontends: int, workers: int) -> list[str]:
    fronts = [f"front-{index}" for index in range(frontends)]
    return ["supervisor", *fronts, *(f"worker-{index}" for index in range(workers))]

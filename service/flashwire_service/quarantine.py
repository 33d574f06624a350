"""The book of requests whose computing has ended workers. Standard library only.

The supervisor keeps it, for it outlives everyone; front ends hold copies. A request is known by two
hashes: `head` of all but its payload, cheap, so that innocents pay for nothing more; `digest` of
all of it. A suspect is computed alone; one that a worker survives is struck off: it was not the
request. The book is bounded: the oldest entry makes room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

DEATHS = 2  # in a row
MOST = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """A suspect. `until`, CLOCK_MONOTONIC seconds, is when it is forgotten."""

    head: bytes
    digest: bytes
    deaths: int
    until: float


class Quarantine:
    """The book. `seconds` is how long an entry counts after the last death; 0: nothing is kept."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._entries: dict[bytes, Entry] = {}  # by digest, the one that died longest ago first

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Those that count."""
        now = self._clock()
        return tuple(entry for entry in self._entries.values() if now < entry.until)

    def install(self, entries: Iterable[Entry]) -> None:
        """Become a copy of another book."""
        self._entries = {entry.digest: entry for entry in entries}

    def died(self, head: bytes, digest: bytes, *, alone: bool = True) -> None:
        """A worker has ended while it computed this request; not `alone`, with others, of which
        each is a suspect, and none more than that.
        """
        deaths = self._deaths(self._entries.pop(digest, None))
        deaths = deaths + 1 if alone else max(deaths, 1)
        self._entries[digest] = Entry(head, digest, deaths, self._clock() + self._seconds)
        while len(self._entries) > MOST:
            del self._entries[next(iter(self._entries))]

    def survived(self, digest: bytes) -> bool:
        """A worker has answered it. True when it was a suspect."""
        return self._entries.pop(digest, None) is not None

    def knows(self, head: bytes) -> bool:
        """Whether a request of this head may be in the book."""
        return any(entry.head == head for entry in self._entries.values())

    def refuses(self, digest: bytes) -> bool:
        """Whether this request is to be computed no more, for now."""
        return self._deaths(self._entries.get(digest)) >= DEATHS

    @property
    def refused(self) -> int:
        """How many requests are to be computed no more, for now."""
        return sum(entry.deaths >= DEATHS for entry in self.entries)

    @property
    def empty(self) -> bool:
        return not self._entries

    def _deaths(self, entry: Entry | None) -> int:
        return entry.deaths if entry is not None and self._clock() < entry.until else 0

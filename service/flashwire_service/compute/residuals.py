"""Saved forwards: what backward needs, kept for a while, within a budget of bytes.

The compute loop alone uses them. When room is short the oldest of an owner go, which expire first:
one's own where one would hold more than an equal share of the budget, else those of whoever does.
Who holds less than that loses nothing to others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flashwire_kernels.errors import NotEnoughMemory
from flashwire_kernels.tensors import Skipped
from flashwire_kernels.types import AttentionSpec
from flashwire_service import residual_id

OWN_BYTES = 4096  # about what Python and torch need for one beside its data, which may be nothing


class Gone(Exception):
    """No such forward is held for this owner: it expired, was released or fell to the budget."""


class TooLargeToKeep(NotEnoughMemory):
    """A forward larger than its owner's saved forwards together may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A forward: its options, its inputs and results (copies of its own), and who computed it,
    past which faster backends."""

    spec: AttentionSpec
    tensors: Mapping[str, torch.Tensor]  # q, k, v and the optional ones, by name
    out: torch.Tensor
    lse: torch.Tensor
    backend: str
    skipped: tuple[Skipped, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors.values(), self.out, self.lse))


@dataclass(frozen=True, slots=True)
class _Entry:
    saved: Saved
    owner: str
    nbytes: int
    expires: float


class Residuals:
    """The saved forwards of one worker, by id."""

    def __init__(
        self,
        *,
        signing_key: bytes,
        worker: int,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signing_key = signing_key
        self._worker = worker
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._ids: dict[str, dict[str, int]] = {}  # by owner: ids and bytes, oldest first
        self._held: dict[str, int] = {}  # bytes, by owner

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def __len__(self) -> int:
        return len(self._entries)

    def require(self, nbytes: int, owner: str, limit: int | None = None) -> None:
        """Raises TooLargeToKeep when a forward of that size could not be kept now."""
        self._outgoing(nbytes, owner, limit)

    def keep(self, saved: Saved, owner: str, limit: int | None = None) -> str:
        """Hold a forward and return its id. `limit` is what its owner may hold; None is all.

        Raises TooLargeToKeep when there is no room, even without what may be pushed out.
        """
        nbytes = saved.nbytes + OWN_BYTES
        for key in self._outgoing(saved.nbytes, owner, limit):
            self._remove(key)
        key = residual_id.mint(self._signing_key, self._worker, owner)
        self._entries[key] = _Entry(saved, owner, nbytes, self._clock() + self._ttl_s)
        self._ids.setdefault(owner, {})[key] = nbytes
        self._held[owner] = self._held.get(owner, 0) + nbytes
        return key

    def get(self, key: str, owner: str) -> Saved:
        """The forward of an id; it stays. Raises Gone."""
        return self._find(key, owner).saved

    def release(self, key: str, owner: str) -> None:
        """Free a forward. Raises Gone."""
        self._find(key, owner)
        self._remove(key)

    def sweep(self) -> None:
        """Free what has expired: all have the same life, so the oldest expire first."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).expires <= now:
            self._remove(next(iter(self._entries)))

    def _outgoing(self, data_bytes: int, owner: str, limit: int | None) -> list[str]:
        """The ids that must go for a forward to be kept. Raises TooLargeToKeep."""
        most = self._max_bytes if limit is None else min(limit, self._max_bytes)
        needed = data_bytes + OWN_BYTES
        if needed > most:
            raise TooLargeToKeep(needed, most)
        held, total = {owner: 0, **self._held}, self.held_bytes + needed
        oldest = {name: iter(ids.items()) for name, ids in self._ids.items()}
        share = self._max_bytes // len(held)
        going: list[str] = []

        def push_out(name: str) -> None:
            nonlocal total
            key, nbytes = next(oldest[name])
            total -= nbytes
            held[name] -= nbytes
            going.append(key)

        while held[owner] + needed > most:
            push_out(owner)
        while total > self._max_bytes:
            largest = max(held, key=lambda name: held[name] if name != owner else -1)
            if held[owner] and held[owner] + needed > share:
                push_out(owner)
            elif largest != owner and held[largest] > share:
                push_out(largest)
            else:  # all that is left is others', and no more than theirs
                raise TooLargeToKeep(needed, self._max_bytes - (total - needed))
        return going

    def _find(self, key: str, owner: str) -> _Entry:
        self.sweep()
        entry = self._entries.get(key)
        if entry is None or entry.owner != owner:
            raise Gone
        return entry

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        ids = self._ids[entry.owner]
        self._held[entry.owner] -= ids.pop(key)
        if not ids:
            del self._ids[entry.owner], self._held[entry.owner]

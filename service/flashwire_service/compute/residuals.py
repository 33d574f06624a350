"""Saved forwards: what backward needs, kept for a while, within a budget of bytes.

The compute loop alone uses them. When room is short the oldest go, which expire first.
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


class Gone(Exception):
    """No such forward is held for this owner: it expired, was released or fell to the budget."""


class TooLargeToKeep(NotEnoughMemory):
    """A forward larger than all saved forwards together may be."""


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
        self._held = 0

    @property
    def held_bytes(self) -> int:
        return self._held

    def __len__(self) -> int:
        return len(self._entries)

    def require(self, nbytes: int) -> None:
        """Raises TooLargeToKeep when a forward of that size could never be kept."""
        if nbytes > self._max_bytes:
            raise TooLargeToKeep(nbytes, self._max_bytes)

    def keep(self, saved: Saved, owner: str) -> str:
        """Hold a forward and return its id. Raises TooLargeToKeep when it exceeds the budget."""
        nbytes = saved.nbytes
        self.require(nbytes)
        while self._held + nbytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
        key = residual_id.mint(self._signing_key, self._worker, owner)
        self._entries[key] = _Entry(saved, owner, nbytes, self._clock() + self._ttl_s)
        self._held += nbytes
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

    def _find(self, key: str, owner: str) -> _Entry:
        self.sweep()
        entry = self._entries.get(key)
        if entry is None or entry.owner != owner:
            raise Gone
        return entry

    def _remove(self, key: str) -> None:
        self._held -= self._entries.pop(key).nbytes

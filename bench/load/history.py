"""What was done to the service, and which outcomes that excuses.

Without disturbances nothing is excused: a steady service answers every good request with 200.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "worker lost", "front lost", "front stopped", "short of memory", "short of descriptors", "end"
]

_SHORT: tuple[Kind, ...] = ("short of memory", "short of descriptors")
_EXCUSES: Mapping[str, tuple[Kind, ...]] = {
    "worker_died": ("worker lost", *_SHORT),
    "no_worker": ("worker lost", *_SHORT),
    "quarantined": ("worker lost", *_SHORT),
    "gone": ("worker lost", *_SHORT),
    "deadline_exceeded": ("worker lost", "front lost", "front stopped", *_SHORT),
    "queue_full": ("worker lost", *_SHORT),
    "not_enough_memory": ("short of memory",),
    "draining": ("end",),
}
# How long a disturbance may be felt. A worker that is stopped while it computes is replaced when
# the longest deadline has passed; backoff and the start of another come on top.
_FELT_S = 45.0
_LOST_S = 5.0  # a connection may hang in a front end that no longer accepts


@dataclass(slots=True)
class History:
    """Disturbances, and when they began."""

    _found: list[tuple[Kind, float]] = field(default_factory=list)

    def note(self, kind: Kind) -> None:
        self._found.append((kind, time.monotonic()))

    def excuses(self, code: str, began: float) -> bool:
        """Whether a refusal of a request that began then is the service's right."""
        return self._disturbed(_EXCUSES.get(code, ()), began - _FELT_S)

    def excuses_loss(self, opened: float) -> bool:
        """Whether a connection opened then may have been lost."""
        return self._disturbed(("front lost", "front stopped", "end"), opened - _LOST_S)

    def excuses_silence(self, opened: float) -> bool:
        """Whether a front end that was stopped may hold a connection opened then."""
        return self._disturbed(("front stopped",), opened - _LOST_S)

    def _disturbed(self, kinds: tuple[Kind, ...], since: float) -> bool:
        return any(kind in kinds and at >= since for kind, at in self._found)

"""What else the machine does while something is measured."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from load import processes

_TICKS = os.sysconf("SC_CLK_TCK")
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7  # of the numbers in /proc/stat


class Watch:
    """`with`, and then `foreign` is the part of the machine's processors that was used by others
    than this process and those that descend from it, of which none may end meanwhile.
    """

    foreign = 0.0

    def __enter__(self) -> Watch:
        self._before = _look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        everything, busy, own = (
            now - then for now, then in zip(_look(), self._before, strict=True)
        )
        self.foreign = min(1.0, max(0.0, (busy - own) / everything))


def _look() -> tuple[float, float, float]:
    """Seconds of all processors, of them in use, and of them by us."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(number) for number in first.split()[1:9]]
    busy = sum(ticks[kind] for kind in (_USER, _NICE, _SYSTEM, _STEAL)) / _TICKS
    return sum(ticks) / _TICKS, busy, sum(map(processes.cpu_seconds, _ours(os.getpid())))


def _ours(pid: int) -> list[int]:
    return [pid, *(found for child in processes.children(pid) for found in _ours(child))]

"""Callers at once, each a process with a connection of its own."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.synchronize import Barrier

from wiring.cases import TINY
from wiring.wires import MAKERS, Wire

CALLERS = 8
_START_S = 60.0
_wires: dict[str, Wire] = {}
_together: list[Barrier] = []


class Company:
    """So many processes while `with` lasts."""

    def __init__(self, callers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._callers = callers
        self._pool = context.Pool(callers, _join, (context.Barrier(callers),))

    def rate(self, name: str, address: tuple[int | str, ...], seconds: float) -> float:
        """Tiny requests a second that all together are answered, for so long."""
        jobs = [(name, address, seconds)] * self._callers
        return sum(self._pool.starmap(_call, jobs, chunksize=1)) / seconds

    def __enter__(self) -> Company:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()


def _join(barrier: Barrier) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent who ends them
    _together.append(barrier)


def _call(name: str, address: tuple[int | str, ...], seconds: float) -> int:
    """Requests answered between the moment when all are there and the end."""
    wire = _wires.get(name) or _wires.setdefault(name, MAKERS[name](*address))
    tensors = TINY.tensors()
    wire.carry(TINY, tensors)
    _together[0].wait(_START_S)
    end = time.monotonic() + seconds
    answered = 0
    while time.monotonic() < end:
        wire.carry(TINY, tensors)
        answered += 1
    return answered

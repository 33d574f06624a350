"""Proving again, between jobs, that the device computes: what was true at the start may end."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from flashwire_service.compute import device as devices
from flashwire_service.compute.failures import DeviceLost, is_out_of_memory
from flashwire_service.ipc.heartbeat import Heartbeat
from flashwire_service.logs import Log

LIMIT_S = 30.0  # of one proof, whose kernels are compiled


class Proving:
    """One part of the proof each `every` seconds of a worker that is idle; 0: none."""

    def __init__(
        self,
        device: torch.device,
        every: float,
        heartbeat: Heartbeat,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._every = every
        self._heartbeat = heartbeat
        self._log = log
        self._clock = clock
        self._last = clock()
        self._next = 0

    def turn(self) -> None:
        """Called by an idle compute loop. Raises DeviceLost for an error or a wrong answer."""
        now = self._clock()
        if not self._every or now - self._last < self._every:
            return
        self._last = now
        self._heartbeat.busy(now + LIMIT_S)
        try:
            devices.prove_part(self._device, self._next)
        except Exception as e:
            if is_out_of_memory(e):  # others have it: no fault of the device
                self._log.warning("no memory for a proof", error=repr(e))
                return
            self._log.error("device failed", error=repr(e))
            raise DeviceLost from e
        self._next = (self._next + 1) % len(devices.PARTS)

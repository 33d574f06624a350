"""The place of a child: who is in it, whether it is well, and how its predecessors ended."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from flashwire_service.ipc.frames import WorkerState
from flashwire_service.ipc.heartbeat import IDLE_LIMIT_S, Heartbeat
from flashwire_service.process import DEVICE_LOST, Child

START_LIMIT_S = 180.0  # from birth to the first beat: torch, a cold disk
FRONT_LIMIT_S = 10.0  # a front end silent for longer is hung: its loop never pauses for so long
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before the nth replacement in a row
HEALTHY_S = 30.0  # a child that was ready this long before it died starts a new row


@dataclass(slots=True)
class Place:
    """A child's place: who is in it now, and how its predecessors fared."""

    role: str  # "worker" or "front"
    index: int
    child: Child | None = None
    heartbeat: Heartbeat | None = None
    ready_since: float | None = None
    ever_ready: bool = False
    device: str = ""  # of the first that was ready: its successors have the same, or none
    stillborn: bool = False  # the last one died before it was ready
    hung: bool = False  # and so killed
    deaths: int = 0  # in a row
    restarts: int = 0
    cause: str = ""  # of the last death
    changed: float = field(default_factory=time.monotonic)  # when it became ready, or was no more
    not_before: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def state(self) -> WorkerState:
        """What front ends are told of it."""
        return WorkerState(
            ready=self.ready_since is not None,
            since=self.changed,
            cause=self.cause,
            restarts=self.restarts,
            next_try=self.not_before if self.child is None else 0.0,
        )

    def complaint(self, now: float) -> str | None:
        """Why a living child must be replaced, or None. A worker that compiles kernels takes as
        long as it takes: from its first beat on, its heart alone tells.
        """
        if self.heartbeat is not None and self.heartbeat.started:
            limit = FRONT_LIMIT_S if self.role == "front" else IDLE_LIMIT_S
            return self.heartbeat.complaint(now, limit)
        if self.child is not None and now - self.child.started > START_LIMIT_S:
            return f"not ready {START_LIMIT_S:.0f} s after its start"
        return None

    def ready(self, now: float, device: str = "") -> None:
        """Its child serves, on this device."""
        self.device = self.device or device
        self.ready_since, self.ever_ready, self.changed = now, True, now

    def failed(self, now: float, code: int | None) -> float:
        """Its child ended with this code, or could not be started (None). Returns the seconds
        until it is to be replaced: more when its predecessors failed, too.
        """
        self.cause = "hung" if self.hung else _cause(code, was_ready=self.ready_since is not None)
        healthy = self.ready_since is not None and now - self.ready_since >= HEALTHY_S
        self.deaths = 1 if healthy else self.deaths + 1
        self.stillborn = code is not None and self.ready_since is None
        if self.ready_since is not None:
            self.changed = now
        self.restarts += 1
        wait = BACKOFF_S[min(self.deaths, len(BACKOFF_S)) - 1]
        self.not_before = now + wait
        return wait


def _cause(code: int | None, *, was_ready: bool) -> str:
    """One of few words: how a process ended."""
    if code == DEVICE_LOST:
        return "device_lost"
    if code == os.EX_CONFIG and not was_ready:
        return "no_device"
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:  # a real-time signal
            return f"signal_{-code}"
    if code is None or not was_ready:
        return "start"
    return f"exit_{code}"

"""Why no worker is ready, in words."""

from __future__ import annotations

from flashwire_service.errors import Refusal
from flashwire_service.ipc.frames import State, WorkerState


def refusal(state: State, now: float) -> Refusal:
    """What /readyz says of it, with a reason for each worker. `now` is CLOCK_MONOTONIC seconds."""
    reasons = [f"worker {index}: {reason(w, now)}" for index, w in enumerate(state.workers)]
    nearest = [w.next_try - now for w in state.workers if w.next_try > now]
    return Refusal(
        "no_worker",
        "no worker is ready",
        reasons=reasons,
        retry_after=min(nearest) if nearest and len(nearest) == len(state.workers) else None,
    )


def reason(worker: WorkerState, now: float) -> str:
    """For how long a worker has been what it is, why, and what comes next."""
    lasted = f"{max(0.0, now - worker.since):.1f} s"
    if worker.ready:
        return f"ready for {lasted}, and not yet connected"
    said = f"not ready for {lasted}"
    if worker.cause:
        said += f", restarts: {worker.restarts}, last end: {worker.cause}"
    if worker.next_try:
        return f"{said}, next try in {max(0.0, worker.next_try - now):.1f} s"
    return f"{said}, starting"

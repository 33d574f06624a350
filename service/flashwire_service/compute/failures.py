"""Whatever a job raises -> a Failure of the service's table. No traceback, no path in a reply."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable

import torch

from flashwire_kernels.errors import InvalidAttention, NotEnoughMemory, UnsupportedBackend
from flashwire_service.compute.residuals import Gone, TooLargeToKeep
from flashwire_service.errors import EXHAUSTED, is_exhaustion
from flashwire_service.ipc.frames import Failure, Job

_GONE = "the residual has expired, was released, made room for others, or ended with its worker"
# torch on a CPU raises a bare RuntimeError, told apart by its text alone.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


# Fields of a check that do not stand in its "request".
_OUTSIDE_REQUEST = ("mine.", "dout", "dlse", "backend")


def failure_of(error: BaseException, job: Job, max_materialise: int) -> Failure:
    """The failure that an exception amounts to, its fields named as in the message.

    max_materialise is the setting of that name: it tells whose limit was met.
    """
    if isinstance(error, NotEnoughMemory):
        failure = _make("not_enough_memory", f"{error}{_way_out(error, job, max_materialise)}")
    else:
        failure = _failure_of(error, _in_check if job.route == "check" else str)
    return dataclasses.replace(failure, id=job.id)


def _way_out(error: NotEnoughMemory, job: Job, max_materialise: int) -> str:
    """Which limit it was, and what can be done."""
    if isinstance(error, TooLargeToKeep):
        return (
            " for saved forwards: send the inputs to backward instead of saving, or raise "
            "FLASHWIRE_RESIDUAL_BYTES"
        )
    if error.available == max_materialise:
        asks = "" if job.route == "check" else "backend 'auto', "
        return (
            f" to the reference and to checks: use {asks}shorter sequences or fewer heads and "
            "batch entries, or raise FLASHWIRE_MAX_MATERIALISE_BYTES"
        )
    return " on this device now: use shorter sequences or fewer heads and batch entries"


def _in_check(field: str) -> str:
    return field if field.startswith(_OUTSIDE_REQUEST) else f"request.{field}"


def _failure_of(error: BaseException, place: Callable[[str], str]) -> Failure:
    if isinstance(error, InvalidAttention):
        fields = [place(v.field) for v in error.violations]
        reasons = [f"{f}: {v.message}" for f, v in zip(fields, error.violations, strict=True)]
        return _make("invalid", "; ".join(reasons), fields[0], reasons)
    if isinstance(error, UnsupportedBackend):
        return _make("unsupported_backend", str(error), place("backend"), list(error.reasons))
    if isinstance(error, Gone):
        return _make("gone", _GONE)
    if is_out_of_memory(error):
        return _make("not_enough_memory", "the device ran out of memory while computing this")
    if is_exhaustion(error):
        return _make("queue_full", EXHAUSTED)
    return _make("internal", "the worker failed to compute this; the server's log says why")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, in any of the ways this is said."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.ENOSPC)
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def _make(
    code: str, detail: str, field: str | None = None, reasons: list[str] | None = None
) -> Failure:
    return Failure(id=0, code=code, detail=detail, field=field, reasons=tuple(reasons or ()))

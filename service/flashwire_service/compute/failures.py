"""Whatever a job raises -> a Failure of the service's table. No traceback, no path in a reply."""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Callable

import torch

from flashwire_kernels.errors import InvalidAttention, NotEnoughMemory, UnsupportedBackend
from flashwire_service.compute.residuals import Gone, TooLargeToKeep
from flashwire_service.compute.room import HostFull
from flashwire_service.errors import EXHAUSTED, is_exhaustion
from flashwire_service.ipc.frames import Failure, Job

_GONE = "the residual has expired, was released, made room for others, or ended with its worker"
# What torch and Triton raise as a bare RuntimeError is told apart by its text alone. On a CPU:
_CPU_ALLOCATOR = "DefaultCPUAllocator"
# "CUDA error: ..." and "HIP error: ..." are torch's, "Triton Error [CUDA]: ..." Triton's.
_DEVICE_ERROR = re.compile(r"\b(CUDA|HIP)( driver)? error\b|\bTriton Error \[(CUDA|HIP)\]", re.I)
_OUT_OF_MEMORY = "out of memory"

# Faults after which no call on the device succeeds in this process. The numbers are CUDA's
# (cudaError_t, CUDA Runtime API, "Data types used by CUDA Runtime"); HIP has the same ones.
_FATAL_CODES = frozenset({
    214,  # uncorrectable ECC error
    220,  # uncorrectable NVLink error
    700,  # illegal memory access
    702,  # launch timed out
    710,  # device-side assert
    714, 715, 716, 717, 718,  # hardware stack, instruction, alignment, address space, counter
    719,  # unspecified launch failure
    999,  # unknown error
})  # fmt: skip
_FATAL_TEXTS = re.compile(
    "uncorrectable|illegal memory access|illegal address|launch timed out|device-side assert"
    "|hardware stack error|illegal instruction|misaligned address|address space|program counter"
    "|unspecified launch failure|unknown error|context is destroyed",
    re.I,
)


class DeviceLost(Exception):
    """The device answers nothing more in this process. A new process may find it well."""


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
        limit = "FLASHWIRE_RESIDUAL_BYTES"
        if error.available == job.max_residual_bytes:
            limit = "FLASHWIRE_KEY_RESIDUAL_BYTES, or this key's residual_bytes"
        advice = "send the inputs to backward instead of saving, or raise"
        return f" for saved forwards: {advice} {limit}"
    if error.available == max_materialise:
        asks = "" if job.route == "check" else "backend 'auto', "
        return (
            f" to the reference and to checks: use {asks}shorter sequences or fewer heads and "
            "batch entries, or raise FLASHWIRE_MAX_MATERIALISE_BYTES"
        )
    where = "for the reply on this machine" if isinstance(error, HostFull) else "on this device"
    return f" {where} now: use shorter sequences or fewer heads and batch entries"


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
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return _CPU_ALLOCATOR in text or (_is_of_device(error) and _OUT_OF_MEMORY in text.lower())


def is_fatal(error: BaseException) -> bool:
    """Whether the device is beyond use in this process, as far as the error itself tells."""
    if not isinstance(error, RuntimeError) or not _is_of_device(error):
        return False
    if getattr(error, "error_code", None) in _FATAL_CODES:
        return True
    return _FATAL_TEXTS.search(str(error)) is not None


def _is_of_device(error: RuntimeError) -> bool:
    return isinstance(error, torch.AcceleratorError) or bool(_DEVICE_ERROR.search(str(error)))


def _make(
    code: str, detail: str, field: str | None = None, reasons: list[str] | None = None
) -> Failure:
    return Failure(id=0, code=code, detail=detail, field=field, reasons=tuple(reasons or ()))

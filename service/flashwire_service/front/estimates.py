"""What computing a request is about to take of its device, by which a worker's queue is bounded.

The worker asks the device itself before it launches anything (compute/room.py); this is for what
waits, and needs shapes alone.
"""

from __future__ import annotations

import functools

from flashwire_kernels import support
from flashwire_kernels.types import ITEM_SIZE
from flashwire_kernels.validation import Problem
from flashwire_service.front.message import Message

_MOST = 2**62  # what fits a frame
_BY_RESIDUAL = 4  # gradients of q, k and v, beside dout, each about as large


def device_bytes(
    route: str, message: Message | None, problem: Problem | None, backend: str, device: str
) -> int:
    """Bytes of inputs, results and what lies between. Where the inputs are a residual's, which only
    the worker knows, `problem` is None and dout tells.
    """
    if message is None:
        return 0
    given = sum(ref.header.nbytes for ref in message.tensors.values())
    if problem is None:
        return min(_BY_RESIDUAL * given, _MOST)
    return min(given + _beside(route, problem, backend, device), _MOST)


@functools.lru_cache(maxsize=256)  # requests that are alike follow each other
def _beside(route: str, problem: Problem, backend: str, device: str) -> int:
    """Results and temporaries; of a check, those of the reference."""
    backward = route == "backward"
    item, rows_q = ITEM_SIZE[problem.dtype], problem.tokens_q * problem.heads_q
    results = rows_q * (problem.dim_v * item + ITEM_SIZE[problem.lse_dtype])
    if backward:
        rows_k = problem.tokens_k * problem.heads_kv
        results = item * (rows_q * problem.dim + rows_k * (problem.dim + problem.dim_v))
    chosen = "reference" if route == "check" else _chosen(problem, backend, device)
    return results + support.extra_bytes(chosen, problem, backward=backward)


def _chosen(problem: Problem, backend: str, device: str) -> str:
    if backend != "auto":
        return backend
    able = (name for name in support.BACKENDS if not support.reasons(name, problem, device))
    return next(able, "reference")

"""Which backend can run a problem, every reason why one cannot, and what it needs. No torch here.

A new backend is a name in BACKENDS and a row in _REASONS, _EXTRA_BYTES and api's _MODULES.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.fused import support as fused_support
from flashwire_kernels.fused.config import MAX_DECODE_ROWS
from flashwire_kernels.types import ITEM_SIZE
from flashwire_kernels.validation import Problem

BACKENDS = ("triton", "cpu", "reference")
"""Fastest first: the order in which "auto" asks them."""


def reasons(backend: str, problem: Problem, device: str) -> tuple[str, ...]:
    """Why `backend` cannot run `problem` on `device` ("cpu", "cuda:0"): every reason, or none.

    Each names the option or tensor, its value and the limit. Raises InvalidAttention for a
    backend that does not exist.
    """
    return tuple(_REASONS[known(backend)](problem, device))


def extra_bytes(backend: str, problem: Problem, *, backward: bool) -> int:
    """About how much memory `backend` needs beside the tensors given and returned."""
    return _EXTRA_BYTES[known(backend)](problem, backward)


def precision(backend: str, problem: Problem) -> str:
    """What `backend` computes float32 products in: "ieee", or "tf32" when that was allowed."""
    return fused_support.precision(problem) if known(backend) == "triton" else "ieee"


def known(backend: str) -> str:
    """`backend` itself. Raises InvalidAttention, with the nearest name, when there is none such."""
    if backend in BACKENDS:
        return backend
    near = difflib.get_close_matches(str(backend), (*BACKENDS, "auto"), n=1, cutoff=0.0)
    names = ", ".join(map(repr, ("auto", *BACKENDS)))
    message = f"must be one of {names}, got {backend!r}; nearest is {near[0]!r}"
    raise InvalidAttention([Violation("backend", message)])


def _reference(problem: Problem, device: str) -> list[str]:
    return []


def _cpu(problem: Problem, device: str) -> list[str]:
    if device.partition(":")[0] == "cpu":
        return []
    return [f"device: the tensors are on {device!r}, this backend computes on 'cpu' only"]


def _reference_bytes(problem: Problem, backward: bool) -> int:
    """Scores and what is derived from them in float64, a few batch rows at a time."""
    largest = max((lq * lk for lq, lk in problem.sequences), default=0) * problem.heads_q
    return (9 if backward else 6) * ITEM_SIZE["float64"] * largest


def _cpu_bytes(problem: Problem, backward: bool) -> int:
    """Wide, padded copies of the tensors and a few tiles."""
    item = ITEM_SIZE[problem.lse_dtype]
    q, k = problem.tokens_q * problem.heads_q, problem.tokens_k * problem.heads_kv
    dim, dim_v = problem.dim + 16, problem.dim_v + 16
    forward = q * (dim + dim_v) + k * (dim + dim_v)
    tiles = 8 << 20
    return item * forward * (3 if backward else 1) + tiles


def _triton_bytes(problem: Problem, backward: bool) -> int:
    """Numbers per row in float32; where there are few queries, a part of out for every 512 keys."""
    rows = problem.tokens_q * problem.heads_q
    if not backward and problem.len_q * problem.group <= MAX_DECODE_ROWS:
        rows *= (problem.dim_v + 1) * (1 + problem.len_k // 512)
    longest = problem.batch * problem.heads_q * (problem.len_q + problem.len_k)
    return ITEM_SIZE["float32"] * (4 * rows + 3 * longest if backward else rows) + (1 << 20)


_REASONS: Mapping[str, Callable[[Problem, str], list[str]]] = MappingProxyType(
    {"triton": fused_support.reasons, "cpu": _cpu, "reference": _reference}
)
_EXTRA_BYTES: Mapping[str, Callable[[Problem, bool], int]] = MappingProxyType(
    {"triton": _triton_bytes, "cpu": _cpu_bytes, "reference": _reference_bytes}
)

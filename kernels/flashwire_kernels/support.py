"""Which backend can run a problem, every reason why one cannot, and what it needs. No torch here.

A new backend is a name in BACKENDS and a row in _REASONS, _EXTRA_BYTES and api's _MODULES.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.fused import support as fused_support
from flashwire_kernels.fused.config import MAX_DECODE_ROWS, shipped
from flashwire_kernels.types import ITEM_SIZE
from flashwire_kernels.validation import Problem

BACKENDS = ("triton", "cpu", "reference")
"""Fastest first: the order in which "auto" asks them."""

_REFERENCE_SCORES_AT_ONCE = 1 << 22
_CPU_SCORES_AT_ONCE = 1 << 18
_SMALL_CHANGE = 1 << 20  # of an allocator that rounds up
_SMALLEST, _LARGEST = 1e-280, 1e280  # factors with which float64 has room for scores


def reasons(backend: str, problem: Problem, device: str) -> tuple[str, ...]:
    """Why `backend` cannot run `problem` on `device` ("cpu", "cuda:0"): every reason, or none.

    Each names the option or tensor, its value and the limit. Raises InvalidAttention for a
    backend that does not exist.
    """
    return tuple(_REASONS[known(backend)](problem, device))


def extra_bytes(backend: str, problem: Problem, *, backward: bool, recomputed: bool = False) -> int:
    """About how much memory `backend` needs beside the tensors given and returned.

    recomputed: of a backward that is given neither out nor lse, and computes them first.
    """
    needed = _EXTRA_BYTES[known(backend)]
    if not (backward and recomputed):
        return needed(problem, backward)
    row = problem.dim_v * ITEM_SIZE[problem.dtype] + ITEM_SIZE[problem.lse_dtype]
    saved = problem.tokens_q * problem.heads_q * row
    return saved + max(needed(problem, False), needed(problem, True))


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
    reasons = []
    if device.partition(":")[0] != "cpu":
        said = f"device: the tensors are on {device!r}, this backend computes on 'cpu' only"
        reasons.append(said)
    beyond = [f for f in score_factors(problem) if f and not _SMALLEST <= abs(f) <= _LARGEST]
    if beyond:
        what = "scale, softcap or scale / softcap" if problem.spec.softcap else "scale"
        said = f"{what} is {beyond[0]:g}; this backend computes with {_SMALLEST:g} to {_LARGEST:g}"
        reasons.append(said)
    return reasons


def score_factors(problem: Problem) -> tuple[float, ...]:
    """What the cpu backend multiplies scores by."""
    scale, softcap = problem.scale, problem.spec.softcap
    if softcap is None:
        return (scale,)
    ratio = scale / softcap if abs(scale) <= softcap * sys.float_info.max else math.inf
    return scale, softcap, ratio


def _reference_bytes(problem: Problem, backward: bool) -> int:
    """float64 copies of the tensors, and some batch rows' scores with what follows from them."""
    pairs = [(problem.heads_q * lq * lk, n) for (lq, lk), n in problem.lengths.items() if n]
    largest = max((scores for scores, _ in pairs), default=0)
    total = sum(scores * n for scores, n in pairs)
    at_once = max(largest, min(total, _REFERENCE_SCORES_AT_ONCE))
    copies = _elements(problem) * (3 if backward else 1)
    return ITEM_SIZE["float64"] * (copies + at_once * (9 if backward else 6))


def _cpu_bytes(problem: Problem, backward: bool) -> int:
    """Wide, padded copies of the tensors and a few tiles."""
    copies = _elements(problem, padding=16) * (3 if backward else 1)
    return ITEM_SIZE[problem.lse_dtype] * (copies + 4 * _CPU_SCORES_AT_ONCE)


def _elements(problem: Problem, padding: int = 0) -> int:
    """Of q, k, v and out."""
    rows = problem.tokens_q * problem.heads_q + problem.tokens_k * problem.heads_kv
    return rows * (problem.dim + problem.dim_v + 2 * padding)


def _triton_bytes(problem: Problem, backward: bool) -> int:
    """Numbers per row or key in float32 or int32; where there are few queries, a part of out for
    every so many keys.
    """
    rows = problem.tokens_q * problem.heads_q
    needed = _SMALL_CHANGE
    if problem.packed:  # two int64 offsets a sequence, two int32 a tile, at least 16 rows each
        tiles = problem.batch + max(problem.tokens_q, problem.tokens_k) // 16
        needed += 16 * (problem.batch + 1) + 8 * tiles
    if backward:  # lse in other units, delta, and what each row adds to its sink
        return needed + 4 * rows * (3 if problem.sinks else 2) + _bias_sums_bytes(problem)
    if problem.len_q * problem.group > MAX_DECODE_ROWS:  # which keys are infinite, and how many
        return needed + 8 * problem.tokens_k * problem.heads_kv
    split = min(config.split for config in shipped("decode").values())
    splits = -(-problem.len_k // split) if problem.len_k > split else 0
    return needed + 4 * splits * rows * (problem.dim_v + 1)


def _bias_sums_bytes(problem: Problem) -> int:
    """A bias without an entry per pair: sums for every head, in float32, then in float64, then
    over those that share it.
    """
    if problem.bias is None:
        return 0
    rows, cols = (1, 1, *problem.bias.shape)[-2:]
    if (rows, cols) == (problem.len_q, problem.len_k):
        return 0
    length = problem.len_k if cols == problem.len_k else problem.len_q
    return 16 * problem.batch * problem.heads_q * length


_REASONS: Mapping[str, Callable[[Problem, str], list[str]]] = MappingProxyType(
    {"triton": fused_support.reasons, "cpu": _cpu, "reference": _reference}
)
_EXTRA_BYTES: Mapping[str, Callable[[Problem, bool], int]] = MappingProxyType(
    {"triton": _triton_bytes, "cpu": _cpu_bytes, "reference": _reference_bytes}
)

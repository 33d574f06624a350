"""What the Triton kernels cannot do. Neither torch nor triton here: front ends ask, too."""

from __future__ import annotations

import functools
import importlib.util

from flashwire_kernels.fused.config import COUNT_FROM, MAX_DECODE_ROWS, decode_splits
from flashwire_kernels.validation import Problem

MAX_DIM = 256
MAX_LENGTH = 2**28  # positions are int32, and twice the sum of two lengths must still be one
MAX_PROGRAMS = 2**31 - 1  # of a launch, all on one axis; also int32 within
_LEAST_TILE = 16  # rows, see config.Config

DEVICES = frozenset({"cuda"})  # PyTorch calls ROCm's devices so, too

_DTYPES = ("float16", "bfloat16", "float32")


def reasons(problem: Problem, device: str) -> list[str]:
    """Every reason why the kernels cannot run `problem` on `device`."""
    found = []
    kind = device.partition(":")[0]
    if kind not in DEVICES:
        found.append(f"device: the tensors are on {device!r}, this backend computes on GPUs only")
    if not _installed():
        found.append("triton: the package is not installed")
    if problem.dtype not in _DTYPES:
        found.append(f"dtype: must be one of {', '.join(_DTYPES)}, got {problem.dtype}")
    for name, dim in (("q", problem.dim), ("v", problem.dim_v)):
        if dim > MAX_DIM:
            found.append(f"{name}: head_dim must be at most {MAX_DIM}, got {dim}")
    for name, length in (("q", problem.len_q), ("k", problem.len_k)):
        if length > MAX_LENGTH:
            found.append(f"{name}: a sequence must have at most {MAX_LENGTH} rows, got {length}")
    programs = _programs(problem)
    if programs > MAX_PROGRAMS:
        found.append(f"q: a launch has at most {MAX_PROGRAMS} programs, this takes {programs}")
    return found


def _programs(problem: Problem) -> int:
    """What no launch has more of: tiles of query heads or key heads; of few queries, their rows and
    the parts of their keys, as many of every sequence as of the longest.
    """
    tiles = sum(
        count * max(
            problem.heads_q * -(-len_q // _LEAST_TILE),
            problem.heads_kv * -(-len_k // _LEAST_TILE),
        )
        for (len_q, len_k), count in problem.lengths.items()
    )  # fmt: skip
    if problem.len_q * problem.group > MAX_DECODE_ROWS:
        return tiles
    parts = -(-problem.len_k // min(decode_splits()))
    shared = max(problem.heads_q * problem.len_q, problem.heads_kv * parts)
    return max(tiles, problem.batch * shared)


def way(problem: Problem) -> tuple[int, ...]:
    """What the longest lengths decide: which kernels run, and how high their tiles are. Packed
    problems that agree in it, and in all else but lengths, run the same kernels.
    """
    rows = problem.len_q * problem.group
    if rows > MAX_DECODE_ROWS:
        return 0, int(rows >= COUNT_FROM)
    return 1 << max(0, rows - 1).bit_length(), sum(problem.len_k > n for n in decode_splits())


@functools.cache
def _installed() -> bool:
    """Asked of every request, and slow to find out."""
    return importlib.util.find_spec("triton") is not None


def precision(problem: Problem) -> str:
    """What float32 products are computed in: what was asked for. 16-bit ones are exact anyway."""
    return problem.spec.precision if problem.dtype == "float32" else "ieee"

"""From options and tensor headers to a Problem: what every backend may take for granted.

Works on headers (dtype and shape), so a front end can refuse a request before its payload arrives.
No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.types import (
    FLOAT_DTYPES,
    MAX_ELEMENTS,
    MAX_SIZE,
    OFFSET_DTYPES,
    AttentionSpec,
    TensorHeader,
)

OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
_PLAIN = {"q", "k", "v", *OFFSETS}
TENSORS = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", *OFFSETS)


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention whose shapes fit together.

    Dense: batch, len_q and len_k are the tensors' own. Packed: batch is the number of sequences,
    len_q and len_k the longest of them, tokens_q and tokens_k the rows of q and of k. Before the
    offsets' values are known (`with_offsets`), a packed problem has len_q and len_k 0.
    """

    spec: AttentionSpec
    dtype: str
    rank: int
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    dim: int
    dim_v: int
    tokens_q: int
    tokens_k: int
    packed: bool = False
    offsets_q: tuple[int, ...] | None = None
    offsets_k: tuple[int, ...] | None = None
    mask: TensorHeader | None = None
    bias: TensorHeader | None = None
    alibi_slopes: TensorHeader | None = None
    sinks: TensorHeader | None = None

    @property
    def scale(self) -> float:
        return self.dim**-0.5 if self.spec.scale is None else self.spec.scale

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(len_q, len_k) of every packed sequence; empty before the offsets are known."""
        lens = (
            [b - a for a, b in itertools.pairwise(offsets or ())]
            for offsets in (self.offsets_q, self.offsets_k)
        )
        return list(zip(*lens, strict=True))

    @property
    def lengths(self) -> Counter[tuple[int, int]]:
        """How many batch rows or packed sequences have which (len_q, len_k)."""
        if self.packed:
            return Counter(self.sequences)
        return Counter({(self.len_q, self.len_k): self.batch})

    def with_offsets(self, offsets_q: Sequence[int], offsets_k: Sequence[int]) -> Problem:
        """The same packed problem once the values of cu_seqlens_q and cu_seqlens_k are known.

        Raises InvalidAttention for offsets that are no packing, and for a mask or bias that does
        not broadcast to (B, Hq, longest Lq, longest Lk).
        """
        wrong = _check_offsets("cu_seqlens_q", offsets_q, self.tokens_q)
        wrong += _check_offsets("cu_seqlens_k", offsets_k, self.tokens_k)
        if wrong:
            raise InvalidAttention(wrong)
        known = dataclasses.replace(
            self,
            offsets_q=tuple(offsets_q),
            offsets_k=tuple(offsets_k),
            len_q=_longest(offsets_q),
            len_k=_longest(offsets_k),
        )
        target = (known.batch, known.heads_q, known.len_q, known.len_k)
        wrong = _check_broadcast("mask", known.mask, target)
        wrong += _check_broadcast("bias", known.bias, target)
        if wrong:
            raise InvalidAttention(wrong)
        return known


def resolve(spec: AttentionSpec, headers: Mapping[str, TensorHeader]) -> Problem:
    """Check the headers of q, k, v and the optional tensors (keys of TENSORS) against each other.

    Raises InvalidAttention naming every violation. For a packed problem, call `with_offsets` once
    the offsets' values are known.
    """
    return _resolve(spec, tuple(headers.items()))


@functools.lru_cache(maxsize=256)  # calls that are alike follow each other
def _resolve(spec: AttentionSpec, items: tuple[tuple[str, TensorHeader], ...]) -> Problem:
    headers = dict(items)
    wrong = [Violation(name, "is missing") for name in "qkv" if name not in headers]
    wrong += [
        Violation(name, f"is no tensor of attention; known: {', '.join(TENSORS)}")
        for name in headers
        if name not in TENSORS
    ]
    wrong += [too_large for name in headers for too_large in check_size(name, headers[name])]
    if wrong:
        raise InvalidAttention(wrong)
    wrong = _check_dtypes(headers)
    shape_errors, problem = _fit(spec, headers)
    wrong += shape_errors
    if problem is not None:
        wrong += _check_optional(problem)
    if wrong or problem is None:
        raise InvalidAttention(wrong)
    return problem


def check_size(name: str, header: TensorHeader) -> list[Violation]:
    """Sizes that no machine could hold, were it not for a 0 among them, are refused as such."""
    wrong = [
        Violation(name, f"sizes go up to {MAX_SIZE}, got {size}")
        for size in header.shape
        if size > MAX_SIZE
    ]
    elements = math.prod(max(1, size) for size in header.shape)
    if not wrong and elements > MAX_ELEMENTS:
        got = list(header.shape)
        wrong.append(Violation(name, f"tensors have at most {MAX_ELEMENTS} elements, got {got}"))
    return wrong


def _check_dtypes(headers: Mapping[str, TensorHeader]) -> list[Violation]:
    wrong = []
    q = headers["q"].dtype
    if q not in FLOAT_DTYPES:
        wrong.append(Violation("q", f"dtype must be one of {', '.join(FLOAT_DTYPES)}, got {q}"))
    wrong += [
        Violation(name, f"dtype must be q's ({q}), got {headers[name].dtype}")
        for name in "kv"
        if headers[name].dtype != q
    ]
    for name in ("bias", "alibi_slopes", "sinks"):
        if name in headers and headers[name].dtype not in FLOAT_DTYPES:
            wrong.append(Violation(name, f"must be floating point, got {headers[name].dtype}"))
    if "mask" in headers and headers["mask"].dtype != "bool":
        hint = "additive values go in bias" if headers["mask"].dtype in FLOAT_DTYPES else ""
        got = f"must be boolean (true = visible), got {headers['mask'].dtype}"
        wrong.append(Violation("mask", f"{got}; {hint}" if hint else got))
    wrong += [
        Violation(name, f"must be int32 or int64, got {headers[name].dtype}")
        for name in OFFSETS
        if name in headers and headers[name].dtype not in OFFSET_DTYPES
    ]
    return wrong


def _fit(
    spec: AttentionSpec, headers: Mapping[str, TensorHeader]
) -> tuple[list[Violation], Problem | None]:
    """The shapes of q, k, v and the offsets against each other."""
    packed = [name for name in OFFSETS if name in headers]
    if packed:
        return _fit_packed(spec, headers)
    rank = len(headers["q"].shape)
    if rank not in (2, 3, 4):
        return [Violation("q", f"must have rank 2, 3 or 4, got {rank}")], None
    wrong = [
        Violation(name, f"must have q's rank {rank}, got {len(headers[name].shape)}")
        for name in "kv"
        if len(headers[name].shape) != rank
    ]
    if wrong:
        return wrong, None
    layout = spec.layout or "bhld"
    (bq, hq, lq, d), (bk, hk, lk, dk), (bv, hv, lv, dv) = (
        _as_bhld(headers[name].shape, layout) for name in "qkv"
    )
    wrong += _equal("k", "batch", bk, "q", bq) + _equal("v", "batch", bv, "q", bq)
    wrong += _equal("v", "length", lv, "k", lk)
    wrong += _check_heads_and_dims(hq, hk, hv, d, dk, dv)
    if wrong:
        return wrong, None
    problem = Problem(
        spec, headers["q"].dtype, rank, bq, hq, hk, lq, lk, d, dv, bq * lq, bq * lk
    )  # fmt: skip
    return [], _with_optional(problem, headers)


def _fit_packed(
    spec: AttentionSpec, headers: Mapping[str, TensorHeader]
) -> tuple[list[Violation], Problem | None]:
    wrong = []
    for name in OFFSETS:
        if name not in headers:
            wrong.append(Violation(name, "is missing: a packed request needs both offsets"))
        elif len(headers[name].shape) != 1 or headers[name].shape[0] < 1:
            shape = list(headers[name].shape)
            wrong.append(Violation(name, f"must have shape [B+1], got {shape}"))
    if len(wrong) == 0 and headers[OFFSETS[0]].shape != headers[OFFSETS[1]].shape:
        counts = [headers[name].shape[0] for name in OFFSETS]
        wrong.append(
            Violation("cu_seqlens_k", f"has {counts[1]} offsets, cu_seqlens_q has {counts[0]}")
        )
    if spec.layout is not None:
        wrong.append(Violation("layout", "packed tensors are (T, H, D); layout must be absent"))
    wrong += [
        Violation(name, f"packed tensors have rank 3 (T, H, D), got {len(headers[name].shape)}")
        for name in "qkv"
        if len(headers[name].shape) != 3
    ]
    if wrong:
        return wrong, None
    (tq, hq, d), (tk, hk, dk), (tv, hv, dv) = (headers[name].shape for name in "qkv")
    wrong += _equal("v", "number of tokens", tv, "k", tk)
    wrong += _check_heads_and_dims(hq, hk, hv, d, dk, dv)
    if wrong:
        return wrong, None
    batch = headers[OFFSETS[0]].shape[0] - 1
    problem = Problem(
        spec, headers["q"].dtype, 3, batch, hq, hk, 0, 0, d, dv, tq, tk, packed=True
    )  # fmt: skip
    return [], _with_optional(problem, headers)


def _as_bhld(shape: tuple[int, ...], layout: str) -> tuple[int, int, int, int]:
    """Any accepted dense shape as (B, H, L, D)."""
    if len(shape) == 2:
        return 1, 1, shape[0], shape[1]
    if len(shape) == 3:
        shape = (1, *shape)
    if layout == "blhd":
        shape = (shape[0], shape[2], shape[1], shape[3])
    b, h, length, d = shape
    return b, h, length, d


def _equal(name: str, what: str, got: int, owner: str, want: int) -> list[Violation]:
    if got == want:
        return []
    return [Violation(name, f"{what} must be {owner}'s ({want}), got {got}")]


def _check_heads_and_dims(hq: int, hk: int, hv: int, d: int, dk: int, dv: int) -> list[Violation]:
    wrong = _equal("v", "heads", hv, "k", hk) + _equal("k", "head_dim", dk, "q", d)
    if (hk == 0 and hq != 0) or (hk != 0 and hq % hk != 0):
        wrong.append(Violation("k", f"heads must divide q's ({hq}), got {hk}"))
    if d < 1:
        wrong.append(Violation("q", "head_dim must be at least 1, got 0"))
    if dv < 1:
        wrong.append(Violation("v", "head_dim must be at least 1, got 0"))
    return wrong


def _with_optional(problem: Problem, headers: Mapping[str, TensorHeader]) -> Problem:
    if headers.keys() <= _PLAIN:
        return problem
    return dataclasses.replace(
        problem,
        mask=headers.get("mask"),
        bias=headers.get("bias"),
        alibi_slopes=headers.get("alibi_slopes"),
        sinks=headers.get("sinks"),
    )


def _check_optional(problem: Problem) -> list[Violation]:
    wrong = []
    b, hq = problem.batch, problem.heads_q
    if problem.alibi_slopes and problem.alibi_slopes.shape not in ((hq,), (b, hq)):
        got = list(problem.alibi_slopes.shape)
        wrong.append(Violation("alibi_slopes", f"must have shape [{hq}] or [{b}, {hq}], got {got}"))
    if problem.sinks and problem.sinks.shape != (hq,):
        got = list(problem.sinks.shape)
        wrong.append(Violation("sinks", f"must have shape [{hq}], got {got}"))
    if not problem.packed:
        target = (b, hq, problem.len_q, problem.len_k)
        wrong += _check_broadcast("mask", problem.mask, target)
        wrong += _check_broadcast("bias", problem.bias, target)
    return wrong


def _check_broadcast(
    name: str, header: TensorHeader | None, target: tuple[int, ...]
) -> list[Violation]:
    if header is None:
        return []
    shape = header.shape
    fits = len(shape) <= 4 and all(
        s in (1, t) for s, t in zip(reversed(shape), reversed(target), strict=False)
    )
    if fits:
        return []
    return [Violation(name, f"must broadcast to {list(target)} (B, Hq, Lq, Lk), got {list(shape)}")]


def _check_offsets(name: str, offsets: Sequence[int], tokens: int) -> list[Violation]:
    if offsets[0] != 0:
        return [Violation(name, f"must start at 0, got {offsets[0]}")]
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b < a:
            return [Violation(name, f"must not decrease, but [{i + 1}] = {b} < [{i}] = {a}")]
    if offsets[-1] > tokens:
        return [Violation(name, f"ends at {offsets[-1]}, beyond the {tokens} packed rows")]
    return []


def _longest(offsets: Sequence[int]) -> int:
    return max((b - a for a, b in itertools.pairwise(offsets)), default=0)

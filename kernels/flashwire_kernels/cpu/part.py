"""A batch made ready to compute: cut to what position lets be seen, wide, aligned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashwire_kernels.cpu.batches import Batch
from flashwire_kernels.geometry import Band
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem

LINE = 64  # bytes; MKL's bits depend on addresses modulo this


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which pattern, and where this part lies in it."""

    p: float
    seed: int
    index: Sequence[int]
    first_row: int
    first_key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Equally long sequences, cut to rows that see a key and keys that a row sees, by position.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv)   `aligned`, so D and Dv may be padded
    band         which keys of the part a row of the part sees; no end that never hides anything
    slopes       (B or 1, Hq, 1, 1)
    mask, bias   4-D, each dimension whole or 1
    careful      some value is not finite, or so large that a score may not be: hide by replacing
    seen_rows    (B or 1, Hq or 1, Lq, 1), known only when careful: rows whose mask and bias leave
                 them a key
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float | None
    band: Band
    slopes: torch.Tensor | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    dropout: Dropout | None
    careful: bool = False
    seen_rows: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows that see a key, the keys that a row sees, and the band between the two."""

    rows: slice
    keys: slice
    band: Band

    @classmethod
    def of(cls, band: Band, len_q: int, len_k: int) -> Cut | None:
        """None when no row sees any key."""
        first = 0 if band.right is None else max(0, -(band.offset + band.right))
        last = len_q if band.left is None else min(len_q, len_k - band.offset + band.left)
        lo, hi = band.any_range(first, last, len_k)
        if first >= last or lo >= hi:
            return None
        offset = band.offset + first - lo
        rows, keys = last - first, hi - lo
        moved = Band(offset, band.left, band.right)
        all_lo, all_hi = moved.all_range(0, rows, keys)
        left = None if all_lo == 0 else band.left
        right = None if all_hi == keys else band.right
        return cls(slice(first, last), slice(lo, hi), Band(offset, left, right))

    def whole(self, len_q: int) -> bool:
        """True when every row sees a key."""
        return bool(self.rows.stop - self.rows.start == len_q)

    def pairs(self, t: torch.Tensor) -> torch.Tensor:
        """Cut a 4-D mask or bias, leaving dimensions of 1 alone."""
        if t.shape[2] != 1:
            t = t[:, :, self.rows]
        return t[..., self.keys] if t.shape[3] != 1 else t


def make_part(problem: Problem, x: Inputs, batch: Batch, cut: Cut) -> Part:
    """The part of `batch` inside `cut`; whether it needs care is for `hidden` to say."""
    spec = problem.spec
    wide = wide_dtype(x.q.dtype)
    q = batch.queries(x.q)[:, :, cut.rows]
    k, v = (batch.keys(t)[:, :, cut.keys] for t in (x.k, x.v))
    dropout = None
    if spec.dropout_p and spec.dropout_seed is not None:
        start = cut.rows.start, cut.keys.start
        dropout = Dropout(spec.dropout_p, spec.dropout_seed, batch.index, *start)
    return Part(
        q=aligned(q, wide),
        k=aligned(k, wide),
        v=aligned(v, wide),
        scale=problem.scale,
        softcap=spec.softcap,
        band=cut.band,
        slopes=None if x.alibi_slopes is None else _slopes(x.alibi_slopes, batch, wide),
        mask=None if x.mask is None else cut.pairs(batch.pairs(x.mask)),
        bias=None if x.bias is None else cut.pairs(batch.pairs(x.bias)),
        dropout=dropout,
    )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def aligned(t: torch.Tensor, dtype: torch.dtype, rows: int | None = None) -> torch.Tensor:
    """(B, H, L, D) in dtype, contiguous, every row on a cache line: equal values, equal bits.

    D is padded with zeros to whole lines, L to `rows`. Returns t itself when it is so already.
    """
    grain = LINE // dtype.itemsize
    length, dim = t.shape[2], t.shape[3]
    rows = length if rows is None else rows
    width = -(-dim // grain) * grain
    fits = t.dtype == dtype and (length, dim) == (rows, width) and t.is_contiguous()
    if fits and t.data_ptr() % LINE == 0:
        return t
    copy = torch.empty((*t.shape[:2], rows, width), dtype=dtype, device=t.device)
    copy[:, :, :length, :dim].copy_(t)
    copy[:, :, length:].zero_()
    copy[:, :, :length, dim:].zero_()
    return copy


def _slopes(slopes: torch.Tensor, batch: Batch, wide: torch.dtype) -> torch.Tensor:
    if slopes.dim() == 2 and len(batch.index) != slopes.shape[0]:
        slopes = slopes[list(batch.index)]
    slopes = slopes.to(wide)
    slopes = slopes.masked_fill(slopes.isinf(), math.nan)
    return slopes.reshape(-1, slopes.shape[-1], 1, 1)

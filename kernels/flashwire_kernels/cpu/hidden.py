"""Keeping what nobody sees from mattering, when it is NaN, infinite or huge.

The fast path needs none of this: 0 times a finite number is 0. Only where something is not `tame`,
the keys that mask and bias hide from a head, and the rows that they leave no key, are replaced by
zeros; and an infinity becomes a NaN, so that no exponential makes it finite again.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from flashwire_kernels.cpu.part import Part, aligned
from flashwire_kernels.geometry import Band

_PAIRS_AT_ONCE = 1 << 17
_TAME = {torch.float32: 1e30, torch.float64: 1e300}  # squares below: no score is infinite


def tame(part: Part, *summed: torch.Tensor) -> bool:
    """False when a value is NaN, infinite or so large that it could make a score so.

    `summed` are the other tensors that are multiplied by weights that are 0 where hidden. May be
    false for huge finite values that do no harm.
    """
    if part.mask is None and part.bias is None:
        # By position alone no row or key of a part is hidden altogether. Only what an exponential
        # could make finite again needs a look; the cheapest is a product that it would spoil.
        q, k = part.q.view(-1), part.k.view(-1)
        products = [(q, k)] if q.numel() == k.numel() else [(q, q), (k, k)]
        return all(math.isfinite(torch.dot(a, b).item()) for a, b in products)
    if part.bias is not None and not part.bias.amax().item() < _TAME[part.q.dtype]:
        return False
    flat = [t.reshape(-1) for t in (part.q, part.k, *summed)]
    return all(torch.dot(t, t).item() < _TAME[t.dtype] for t in flat)


def scrub(part: Part) -> Part:
    """The same part, careful. Where heads that share a key differ in seeing it, k and v are
    given per query head (Hkv becomes Hq)."""
    q, k, v = (nan_for_inf(t) for t in (part.q, part.k, part.v))
    careful = dataclasses.replace(part, q=q, k=k, v=v, careful=True)
    if part.mask is None and part.bias is None:
        return careful
    rows, keys = _seen(part)
    if keys.shape[1] != 1 and part.group != 1:
        k, v = (t.repeat_interleave(part.group, dim=1) for t in (k, v))
    return dataclasses.replace(
        careful,
        q=aligned(q.where(rows, 0), q.dtype),
        k=aligned(k.where(keys, 0), k.dtype),
        v=aligned(v.where(keys, 0), v.dtype),
        seen_rows=rows,
    )


def nan_for_inf(t: torch.Tensor) -> torch.Tensor:
    """A copy with NaN for every infinity."""
    return t.masked_fill(t.isinf(), math.nan)


def visible_by_position(band: Band, rows: range, keys: range, device: torch.device) -> torch.Tensor:
    """Boolean (rows, keys)."""
    ahead = relative(band, rows, keys, device)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if band.left is not None:
        visible &= ahead >= -band.left
    if band.right is not None:
        visible &= ahead <= band.right
    return visible


def relative(band: Band, rows: range, keys: range, device: torch.device) -> torch.Tensor:
    """j - pos(i), int64 (rows, keys)."""
    i = torch.arange(rows.start, rows.stop, device=device)
    j = torch.arange(keys.start, keys.stop, device=device)
    return j - (i[:, None] + band.offset)


def _seen(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows see a key and which keys a row sees: (b, h, Lq, 1) and (b, h, Lk, 1), with b and h
    those of mask and bias."""
    len_q, len_k = part.q.shape[2], part.k.shape[2]
    given = [t for t in (part.mask, part.bias) if t is not None]
    b, h = (max(t.shape[dim] for t in given) for dim in (0, 1))
    rows = part.q.new_zeros((b, h, len_q), dtype=torch.bool)
    keys = part.q.new_zeros((b, h, len_k), dtype=torch.bool)
    step = max(1, _PAIRS_AT_ONCE // (b * h * len_k))
    for first in range(0, len_q, step):
        block = range(first, min(first + step, len_q))
        visible = visible_by_position(part.band, block, range(len_k), part.q.device)
        if part.mask is not None:
            visible = visible & _rows_of(part.mask, block)
        if part.bias is not None:
            visible = visible & (_rows_of(part.bias, block) != -math.inf)
        rows[:, :, block.start : block.stop] = visible.any(-1)
        keys |= visible.any(-2)
    return rows[..., None], keys[..., None]


def _rows_of(t: torch.Tensor, block: range) -> torch.Tensor:
    return t if t.shape[2] == 1 else t[:, :, block.start : block.stop]

"""Attention over a union of key sets, from attentions over each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashwire.tensors import Array, home_of


def merge(
    outs: Sequence[Array], lses: Sequence[Array], *, layout: str = "bhld"
) -> tuple[Array, Array]:
    """(out, lse) over the union of disjoint key sets, exactly, from the results over each set.

    outs     one out per key set, all of one shape: (B, H, L, D), (H, L, D), (L, D), or packed
             (T, H, D). With layout "blhd": (B, L, H, D) or (L, H, D)
    lses     their lse, B,H-first in either layout; (T, H) packed

    NumPy gives NumPy, torch gives torch and is differentiable. Computed in float64, returned in the
    dtypes given. A row that a set hides wholly (lse -inf) takes nothing from it, whatever its out
    holds; one hidden by all sets has out 0 and lse -inf. Sinks belong into one of the sets only,
    since each lse counts its own. Raises ValueError when shapes do not fit.

        lse = log sum_n exp(lse_n),   out = sum_n exp(lse_n - lse) * out_n
    """
    if len(outs) != len(lses) or not outs:
        raise ValueError(f"needs one lse for each out: {len(outs)} outs, {len(lses)} lses")
    if layout not in ("bhld", "blhd"):
        raise ValueError(f"layout must be 'bhld' or 'blhd', got {layout!r}")
    for name, arrays in (("outs", outs), ("lses", lses)):
        if len({tuple(array.shape) for array in arrays}) > 1:
            raise ValueError(f"{name} differ in shape: {[tuple(a.shape) for a in arrays]}")
    xp: Any = np if home_of(outs[0]) is None else sys.modules["torch"]
    out = xp.stack([_wide(xp, out) for out in outs])
    lse = xp.stack([_wide(xp, lse) for lse in lses])
    by_row = xp.swapaxes(lse, -1, -2) if layout == "blhd" and out.ndim > 3 else lse
    if by_row.shape != out.shape[:-1]:
        shapes = f"out {tuple(out.shape[1:])}, lse {tuple(lse.shape[1:])}"
        raise ValueError(f"lse must have out's shape without the head dimension: {shapes}")
    with np.errstate(invalid="ignore", divide="ignore"):
        weights, _ = _weights(xp, by_row)
        _, total = _weights(xp, lse)
        merged = xp.sum(xp.where(weights[..., None] == 0, 0.0, out) * weights[..., None], 0)
    return _like(xp, merged, outs[0]), _like(xp, total, lses[0])


def _weights(xp: Any, lse: Array) -> tuple[Array, Array]:
    """(exp(lse_n - lse), lse) of stacked lse_n; weights are 0 where all are -inf."""
    top = xp.amax(lse, 0)
    top = xp.where(xp.isneginf(top), 0.0, top)
    shares = xp.exp(lse - top)
    total = xp.sum(shares, 0)
    safe = xp.where(total == 0, 1.0, total)
    return shares / safe, top + xp.where(total == 0, -np.inf, xp.log(safe))


def _wide(xp: Any, values: Array) -> Array:
    return values.astype(np.float64) if xp is np else values.to(xp.float64)


def _like(xp: Any, values: Array, like: Array) -> Array:
    return values.astype(like.dtype) if xp is np else values.to(like.dtype)

"""Tile steps of the backward kernels, and what they start from."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.arguments import Lengths
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.primitives import (
    INF,
    exp_of,
    in_units,
    load_rows,
    number_index,
    place,
    row_pointers,
    score_tile,
    sequence_bounds,
    visible_range,
)
from flashwire_kernels.validation import Problem


@triton.jit
def within_sight(positions, length, shift, left, right):
    """Which positions see something of a sequence of `length`, by the band alone."""
    lo, hi, _, _ = visible_range(positions, positions + 1, length, shift, left, right)
    return lo < hi


@triton.jit
def in_sight(positions, start, length, shift, left, right, SIZE: tl.constexpr):
    """Which of SIZE positions from `start` on each of `positions` sees, a row for each of these, by
    the band (see visible_range) and, where given, the length. One of the three has to be.
    """
    offsets = tl.arange(0, SIZE)[None, :]
    if length is None and right is None:
        return offsets >= (positions + (shift - left) - start)[:, None]
    else:
        if right is None:
            last = tl.zeros_like(positions) + (length - 1)
        else:
            last = positions + (shift + right)
            if length is not None:
                last = tl.minimum(last, length - 1)
        visible = offsets <= (last - start)[:, None]
        if left is not None:
            visible &= offsets >= (positions + (shift - left) - start)[:, None]
        return visible


@triton.jit
def p_tile(
    product, lse, in_band, score, window, b, h, i, j, len_q, len_k, shift,
    EDGE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """(p, visible, steepness) of a tile of products q.k, like score_tile; lse is in its units, and
    p 0 where hidden. in_band: what the band shows of an EDGE without mask and bias, or None.

    A score need not be finite: where it is not, the row's lse is not either.
    """
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    s, visible, steepness = score_tile(
        product, score, window, b, h, i, j, len_q, len_k, shift, EDGE and MASKED, FOLD, False
    )
    if FOLD:
        p = tl.exp2(s * score.factor - lse)
    else:
        p = exp_of(s - lse, score.bias is not None)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    elif in_band is not None:
        p = tl.where(in_band, p, 0.0)
    return p, visible, steepness


@triton.jit
def ds_tile(p, dp, delta, keep, visible, steepness, score, dropout):
    """(ds, d (product * scale)) of a tile from p, products dout.v, and what dropout keeps.

    What a mask or bias hides is 0 in both. So is what the band hides; but NaN where dp or delta is
    not finite, which belong to a key or query that something sees.
    """
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    if dropout.key0 is not None:
        dp = tl.where(keep, dp, 0.0) * dropout.factor
    ds = p * (dp - delta)
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    draw = ds
    if score.softcap is not None:
        draw = ds * steepness
        if MASKED:
            draw = tl.where(visible, draw, 0.0)
    return ds, draw


@triton.jit
def head_index(b, h, heads, span, PACKED: tl.constexpr):
    """Where a head's numbers begin in one of row_numbers; span is how many it has of one head."""
    if PACKED:
        return tl.cast(h, tl.int64) * span
    else:
        return (b.to(tl.int64) * heads + h) * span


@triton.jit
def load_numbers(pointers, wanted):
    """The wanted ones, 0 for others; all are wanted when that is None."""
    if wanted is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=wanted, other=0.0)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "span"])
def delta_kernel(
    out, dout, lse, dlse, scaled_lse, delta, span, len_q, offsets_q,
    tile_list, tiles, heads, heads_per_row, heads_at_once,
    NATURAL: tl.constexpr, M: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """delta = sum of dout * out, less dlse; 0 where lse is -inf and so depends on nothing.
    scaled_lse is lse in the units of scores.
    """
    PACKED: tl.constexpr = offsets_q is not None
    b, h, tile = place(tile_list, tiles, heads, heads_per_row, heads_at_once, False)
    first, length, _, _ = sequence_bounds(Lengths(len_q, len_q, offsets_q, offsets_q), b)
    start = tile * M
    rows = start + tl.arange(0, M)
    wanted = rows < length
    o = load_rows(row_pointers(out, b, h, first + start, M, DIM_V_PAD), wanted, DIM_V)
    do = load_rows(row_pointers(dout, b, h, first + start, M, DIM_V_PAD), wanted, DIM_V)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    given = number_index(b, h, first + rows, heads_per_row, len_q, PACKED)
    if dlse is not None:
        total -= tl.load(dlse + given, mask=wanted, other=0.0)
    row_lse = tl.load(lse + given, mask=wanted, other=-INF)
    total = tl.where(row_lse == -INF, 0.0, total)
    found = head_index(b, h, heads_per_row, span, PACKED) + first + rows
    tl.store(scaled_lse + found, in_units(row_lse, NATURAL), mask=wanted)
    tl.store(delta + found, total, mask=wanted)


def row_numbers(lse: torch.Tensor, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for two numbers per query, contiguous, a head's one after the other: (B, H, L) or, even
    of packed sequences, (H, T).
    """
    first, second = lse.new_empty((2, *(lse.T if packed else lse).shape))
    return first, second


def described(
    tensors: tuple[torch.Tensor, torch.Tensor], packed: bool, n: int, config: Config
) -> list[TensorDescriptor | None]:
    """Descriptors of tiles of n rows, where `config` wants them."""
    return [args.tiles(t, packed, n) if config.descriptors else None for t in tensors]


def delta_call(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    found: tuple[torch.Tensor, torch.Tensor],
    config: Config,
) -> Call:
    """Writes lse in the units of scores, and delta, into `found` (row_numbers)."""
    packed = problem.packed
    grid = args.query_grid(problem, config.m, out.device)
    len_q, _, offsets_q, _ = args.lengths(problem, out.device)
    positional = (
        args.rows(out, packed), args.rows(dout, packed), lse.contiguous(),
        None if dlse is None else dlse.contiguous(), *found, found[0].shape[-1], len_q, offsets_q,
        *grid.arguments,
    )  # fmt: skip
    constants = {
        "NATURAL": problem.bias is not None, "M": config.m, "DIM_V": problem.dim_v,
        "DIM_V_PAD": args.padded(problem.dim_v),
    }  # fmt: skip
    return Call(delta_kernel, grid.programs, positional, constants, config)

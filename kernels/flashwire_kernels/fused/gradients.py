"""Tile steps of the backward kernels, and what they start from."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.primitives import (
    INF,
    LOG2E,
    load_rows,
    place,
    row_pointers,
    scalar_pointers,
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
    """(p, visible, steepness) of a tile of products q.k, like score_tile; lse is in units of log2,
    and p 0 where hidden. in_band: what the band shows of an EDGE without mask and bias, or None.

    A score need not be finite: where it is not, the row's lse is not either.
    """
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    s, visible, steepness = score_tile(
        product, score, window, b, h, i, j, len_q, len_k, shift, EDGE and MASKED, FOLD, False
    )
    if FOLD:
        p = tl.exp2(s * score.factor - lse)
    else:
        p = tl.exp2(s - lse)
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
    if dropout is not None:
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
def load_scalars(t, b, h, rows, wanted):
    """A head's numbers of the wanted rows, 0 for others; all are wanted when that is None."""
    if wanted is None:
        return tl.load(scalar_pointers(t, b, h, rows))
    else:
        return tl.load(scalar_pointers(t, b, h, rows), mask=wanted, other=0.0)


@triton.jit(do_not_specialize=UNSPECIALISED)
def delta_kernel(
    out, dout, lse, dlse, scaled_lse, delta, lengths,
    tile_list, tiles, heads, heads_per_row, heads_at_once,
    M: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """delta = sum of dout * out, less dlse; 0 where lse is -inf and so depends on nothing.
    scaled_lse is lse in units of log2.
    """
    b, h, tile = place(tile_list, tiles, heads, heads_per_row, heads_at_once, False)
    first_q, len_q, _, _ = sequence_bounds(lengths, b)
    start = tile * M
    rows = start + tl.arange(0, M)
    wanted = rows < len_q
    o = load_rows(row_pointers(out, b, h, first_q + start, M, DIM_V_PAD), wanted, DIM_V)
    do = load_rows(row_pointers(dout, b, h, first_q + start, M, DIM_V_PAD), wanted, DIM_V)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(scalar_pointers(dlse, b, h, first_q + rows), mask=wanted, other=0.0)
    row_lse = tl.load(scalar_pointers(lse, b, h, first_q + rows), mask=wanted, other=-INF)
    tl.store(scalar_pointers(scaled_lse, b, h, first_q + rows), row_lse * LOG2E, mask=wanted)
    total = tl.where(row_lse == -INF, 0.0, total)
    tl.store(scalar_pointers(delta, b, h, first_q + rows), total, mask=wanted)


def row_numbers(lse: torch.Tensor, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for two numbers per query, each shaped like lse, with a head's one after the other."""
    if packed:
        lse = lse.T
    room = lse.new_empty((2, *lse.shape))
    return (room[0].T, room[1].T) if packed else (room[0], room[1])


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
    """Writes lse in units of log2, and delta (`found`)."""
    packed = problem.packed
    grid = args.query_grid(problem, config.m, out.device)
    positional = (
        args.rows(out, packed), args.rows(dout, packed), args.scalars(lse, packed),
        None if dlse is None else args.scalars(dlse, packed),
        args.scalars(found[0], packed), args.scalars(found[1], packed),
        args.lengths(problem, out.device), *grid.arguments,
    )  # fmt: skip
    constants = {"M": config.m, "DIM_V": problem.dim_v, "DIM_V_PAD": args.padded(problem.dim_v)}
    return Call(delta_kernel, grid.programs, positional, constants, config)

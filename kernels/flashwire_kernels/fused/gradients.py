"""Tile steps of the backward kernels, and what they start from."""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.primitives import (
    INF,
    load_rows,
    place,
    row_pointers,
    scalar_pointers,
    score_tile,
    sequence_bounds,
)
from flashwire_kernels.validation import Problem


@triton.jit
def gradient_tile(
    product, dp, lse, delta, keep, score, window, dropout, b, h, i, j, bounds,
    EDGE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """(p that dropout kept, ds, d (product * scale), visible) of a tile, from products q.k and
    dout.v; lse is in units of log2. What is hidden is 0 in each.
    """
    len_q, len_k, shift = bounds
    HIDES: tl.constexpr = EDGE or score.mask is not None or score.bias is not None
    s, visible, steepness = score_tile(
        product, score, window, b, h, i, j, len_q, len_k, shift, EDGE, FOLD
    )
    if FOLD:
        p = tl.exp2(s * score.factor - lse)
    else:
        p = tl.exp2(s - lse)
    if HIDES:
        p = tl.where(visible, p, 0.0)
    kept = p
    if dropout is not None:
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp, 0.0) * dropout.factor
    ds = p * (dp - delta)
    if HIDES:
        ds = tl.where(visible, ds, 0.0)
    draw = ds
    if score.softcap is not None:
        draw = ds * steepness
        if HIDES:
            draw = tl.where(visible, draw, 0.0)
    return kept, ds, draw, visible


@triton.jit(do_not_specialize=UNSPECIALISED)
def delta_kernel(
    out, dout, lse, dlse, delta, lengths, tile_list, tiles, heads, heads_per_row, heads_at_once,
    M: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """delta = sum of dout * out, less dlse; 0 where lse is -inf and so depends on nothing."""
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
    total = tl.where(row_lse == -INF, 0.0, total)
    tl.store(scalar_pointers(delta, b, h, first_q + rows), total, mask=wanted)


def delta_call(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    delta: torch.Tensor,
    config: Config,
) -> Call:
    """Writes delta, float32 and shaped like lse."""
    packed = problem.packed
    grid = args.query_grid(problem, config.m, out.device)
    positional = (
        args.rows(out, packed), args.rows(dout, packed), args.scalars(lse, packed),
        None if dlse is None else args.scalars(dlse, packed), args.scalars(delta, packed),
        args.lengths(problem, out.device), *grid.arguments,
    )  # fmt: skip
    constants = {"M": config.m, "DIM_V": problem.dim_v, "DIM_V_PAD": args.padded(problem.dim_v)}
    return Call(delta_kernel, grid.programs, positional, constants, config)

"""The forward kernel: a program per tile of queries of one head, online softmax over key tiles."""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.infinite import infinite_between
from flashwire_kernels.fused.primitives import (
    INF,
    LN2,
    LOG2E,
    alignment,
    described_tile,
    keep_tile,
    load_rows,
    nan_for_inf,
    place,
    row_pointers,
    scalar_pointers,
    score_tile,
    seen,
    sequence_bounds,
    split_range,
    store_rows,
    visible_range,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


@triton.jit
def softmax_step(
    s, m, lowest, factor, GUARD: tl.constexpr, FOLD: tl.constexpr, WATCH: tl.constexpr
):
    """One tile of an online softmax: (p, correction of what came before, new m, new lowest).

    m is the largest score of a row so far, in units of log2. GUARD: rows may have seen nothing.
    WATCH: keep the least product, since a visible one of -inf would vanish in exp2.
    """
    if FOLD:
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
    else:
        m_new = tl.maximum(m, tl.max(s, 1))
    base = m_new
    if GUARD:
        base = tl.where(m_new == -INF, 0.0, m_new)
    if FOLD:
        p = tl.exp2(s * factor - base[:, None])
    else:
        p = tl.exp2(s - base[:, None])
    if WATCH:
        lowest = tl.minimum(lowest, tl.min(s, 1))
    return p, tl.exp2(m - base), m_new, lowest


@triton.jit
def attend(
    state, q, k, v, k_tiles, v_tiles, origin, b, h, i, bounds, lo, hi, first, before, jump, count,
    score, window, dropout,
    EDGE: tl.constexpr, FOLD: tl.constexpr, WATCH: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, stride_k, stride_v,
):  # fmt: skip
    """Take `count` key tiles into (acc, l, m, lowest): from `first` on, `before` of them, and the
    others from there + `jump`. k and v are pointers to the sequence's first N rows; k_tiles and
    v_tiles, where given, descriptors that bring tiles whole, and origin (b, head, row) that row's
    place in them.
    """
    acc, l, m, lowest = state
    len_q, len_k, shift = bounds
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    for n in range(count):
        tile = first + n
        if EDGE:
            tile += tl.where(n < before, 0, jump)
        start = tl.multiple_of(tile * N, N)
        cols = start + tl.arange(0, N)
        wanted = None
        if EDGE:
            wanted = (cols >= lo) & (cols < hi)
        if EDGE or k_tiles is None:
            k_tile = load_rows(k + start.to(tl.int64) * stride_k, wanted, DIM)
        else:
            k_tile = described_tile(k_tiles, origin, start, N, k.shape[1])
        product = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        s, visible, _ = score_tile(
            product, score, window, b, h, i, cols[None, :], len_q, len_k, shift, EDGE, FOLD
        )
        p, correction, m, lowest = softmax_step(
            s, m, lowest, score.factor, EDGE or MASKED, FOLD, WATCH and not (EDGE or MASKED)
        )
        l = l * correction + tl.sum(p, 1)
        if EDGE or v_tiles is None:
            v_tile = load_rows(v + start.to(tl.int64) * stride_v, wanted, DIM_V)
        else:
            v_tile = described_tile(v_tiles, origin, start, N, v.shape[1])
        if MASKED:
            v_tile = tl.where(seen(visible, 0)[:, None], v_tile, 0.0)
        if dropout is not None:
            p = tl.where(keep_tile(dropout, b, h, i, start, q.shape[0], N), p, 0.0)
        acc = acc * correction[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, l, m, lowest


@triton.jit
def attend_range(
    q_tile, k, v, k_tiles, v_tiles, infinite, origin, b, h, i, first_row, last_row, bounds, m, l,
    score, window, dropout,
    FOLD: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
    first_key, last_key,
):  # fmt: skip
    """(acc, l, m) of rows [first_row, last_row) over the keys in [first_key, last_key) they see:
    the tiles that every row sees whole first, then the edges. `infinite` counts the keys with an
    Inf or NaN up to each, or is None.
    """
    WATCH: tl.constexpr = FOLD and infinite is None
    _, len_k, shift = bounds
    lo, hi, all_lo, all_hi = visible_range(
        first_row, last_row, len_k, shift, window.left, window.right
    )
    lo, hi = tl.maximum(lo, first_key), tl.minimum(hi, last_key)
    all_lo, all_hi = tl.maximum(all_lo, first_key), tl.minimum(all_hi, last_key)
    first, before, full, full_end, edges = split_range(lo, hi, all_lo, all_hi, N)
    k_pointers = row_pointers(k, origin[0], origin[1], origin[2], N, DIM_PAD)
    v_pointers = row_pointers(v, origin[0], origin[1], origin[2], N, DIM_V_PAD)
    acc = tl.zeros([q_tile.shape[0], DIM_V_PAD], tl.float32)
    lowest = tl.zeros([q_tile.shape[0]], tl.float32)
    state = attend(
        (acc, l, m, lowest), q_tile, k_pointers, v_pointers, k_tiles, v_tiles, origin,
        b, h, i, bounds, lo, hi, full, 0, 0, full_end - full,
        score, window, dropout, False, FOLD, WATCH, PRECISION, N, DIM, DIM_V, k.row, v.row,
    )  # fmt: skip
    if infinite is not None:
        spoiled = infinite_between(infinite, origin, full * N, full_end * N)
        l = tl.where(spoiled, float("nan"), state[1])
        state = (state[0], l, state[2], state[3])
    acc, l, m, lowest = attend(
        state, q_tile, k_pointers, v_pointers, k_tiles, v_tiles, origin, b, h, i, bounds, lo, hi,
        first, before, full_end - full, edges,
        score, window, dropout, True, FOLD, False, PRECISION, N, DIM, DIM_V, k.row, v.row,
    )  # fmt: skip
    return acc, tl.where(lowest == -INF, float("nan"), l), m


@triton.jit
def normalise(acc, l, m, dropout):
    """(out, lse) of what was summed up; 0 and -inf of a row that saw nothing."""
    nothing = l == 0
    factor = 1.0
    if dropout is not None:
        factor = dropout.factor
    out = acc * (factor / tl.where(nothing, 1.0, l))[:, None]
    lse = tl.where(nothing, -INF, (m + tl.log2(tl.where(nothing, 1.0, l))) * LN2)
    return out, lse


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward_kernel(
    q, k, v, k_tiles, v_tiles, infinite, out, lse, sinks, score, window, dropout, lengths,
    tile_list, tiles, heads, heads_per_row, heads_at_once,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """out and lse of M queries. Grid: (tiles * heads,), heads counting batch rows too."""
    b, h, tile = place(
        tile_list, tiles, heads, heads_per_row, heads_at_once, window.right is not None
    )
    first_q, len_q, first_k, len_k = sequence_bounds(lengths, b)
    shift = alignment(len_q, len_k, BOTTOM_RIGHT)
    row_of_keys = b
    if lengths.offsets_k is not None:
        row_of_keys = b * 0
    start = tile * M
    rows = start + tl.arange(0, M)
    wanted = rows < len_q
    q_pointers = row_pointers(q, b, h, first_q + start, M, DIM_PAD)
    q_tile = load_rows(q_pointers, wanted, DIM)
    q_tile = nan_for_inf(q_tile.to(tl.float32)).to(q_tile.dtype)
    sink = -INF
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
    m = tl.zeros([M], tl.float32) + sink * LOG2E
    l = tl.where(m == -INF, 0.0, 1.0)
    acc, l, m = attend_range(
        q_tile, k, v, k_tiles, v_tiles, infinite, (row_of_keys, h // GROUP, first_k), b, h,
        rows[:, None], start, tl.minimum(start + M, len_q), (len_q, len_k, shift), m, l,
        score, window, dropout,
        FOLD, PRECISION, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD, 0, len_k,
    )  # fmt: skip
    result, row_lse = normalise(acc, l, m, dropout)
    out_pointers = row_pointers(out, b, h, first_q + start, M, DIM_V_PAD)
    store_rows(out_pointers, result, wanted, DIM_V)
    tl.store(scalar_pointers(lse, b, h, first_q + rows), row_lse, mask=wanted)


def call(
    problem: Problem,
    x: Inputs,
    infinite: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: Config,
) -> Call:
    """Writes every row of out and lse that belongs to a sequence.

    infinite: how many keys up to each, and with it, hold an Inf or NaN; None to watch for them.
    """
    packed, device = problem.packed, x.q.device
    grid = args.query_grid(problem, config.m, device)
    score = args.score(problem, x)
    tiles = (
        [args.tiles(t, packed, config.n) for t in (x.k, x.v)] if config.descriptors else [None] * 2
    )
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed), *tiles,
        None if infinite is None else args.scalars(infinite, packed),
        args.rows(out, packed), args.scalars(lse, packed), args.sinks(x),
        score, args.window(problem), args.dropout(problem), args.lengths(problem, device),
        *grid.arguments,
    )  # fmt: skip
    constants = args.constants(problem) | {"FOLD": args.folds(score), "M": config.m, "N": config.n}
    return Call(forward_kernel, grid.programs, positional, constants, config)

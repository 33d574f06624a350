"""The backward kernels: dK and dV by a program per tile of keys, dQ by one per tile of queries.

Every sum is taken within one program, in a fixed order: no atomics.
"""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.gradients import gradient_tile
from flashwire_kernels.fused.primitives import (
    INF,
    LOG2E,
    alignment,
    keep_tile,
    load_rows,
    place,
    row_pointers,
    scalar_pointers,
    seen,
    sequence_bounds,
    split_range,
    store_rows,
    visible_range,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


@triton.jit
def keys_range(
    state, k_tile, v_tile, q, dout, lse, delta, b, h, j, start_n, first_q, bounds, lo, hi,
    first, before, jump, count, score, window, dropout,
    EDGE: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """Take `count` query tiles of a head into (dk, dv, sums of ds by key)."""
    dk, dv, sums = state
    len_q, _, _ = bounds
    q_pointers = row_pointers(q, b, h, first_q, M, DIM_PAD)
    do_pointers = row_pointers(dout, b, h, first_q, M, DIM_V_PAD)
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    for n in range(count):
        tile = first + n
        if EDGE:
            tile += tl.where(n < before, 0, jump)
        start = tl.multiple_of(tile * M, M)
        rows = start + tl.arange(0, M)
        wanted = None
        if EDGE:
            wanted = (rows >= lo) & (rows < hi)
        q_tile = load_rows(q_pointers + start.to(tl.int64) * q.row, wanted, DIM)
        do_tile = load_rows(do_pointers + start.to(tl.int64) * dout.row, wanted, DIM_V)
        inside = rows < len_q
        row_lse = tl.load(scalar_pointers(lse, b, h, first_q + rows), mask=inside, other=INF)
        row_delta = tl.load(scalar_pointers(delta, b, h, first_q + rows), mask=inside, other=0.0)
        keep = True
        if dropout is not None:
            keep = tl.trans(keep_tile(dropout, b, h, rows[:, None], start_n, M, k_tile.shape[0]))
        product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
        p, ds, draw, visible = gradient_tile(
            product, dp, (row_lse * LOG2E)[None, :], row_delta[None, :], keep,
            score, window, dropout, b, h, rows[None, :], j, bounds, EDGE, FOLD,
        )  # fmt: skip
        if MASKED:
            some = seen(visible, 0)[:, None]
            q_tile = tl.where(some, q_tile, 0.0)
            do_tile = tl.where(some, do_tile, 0.0)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dk = tl.dot(draw.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
        if score.bias is not None:
            sums += tl.sum(ds, 1)
    return dk, dv, sums


@triton.jit(do_not_specialize=UNSPECIALISED)
def keys_kernel(
    q, k, v, dout, lse, delta, dk, dv, bias_sums, score, window, dropout, scale, lengths,
    tile_list, tiles, heads, heads_per_row, heads_at_once,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys, over the heads that share them; bias_sums (B, Hq, Lk) of ds."""
    b, h_kv, tile = place(tile_list, tiles, heads, heads_per_row, heads_at_once, False)
    first_q, len_q, first_k, len_k = sequence_bounds(lengths, b)
    shift = alignment(len_q, len_k, BOTTOM_RIGHT)
    bounds = (len_q, len_k, shift)
    start = tile * N
    cols = start + tl.arange(0, N)
    wanted = cols < len_k
    k_tile = load_rows(row_pointers(k, b, h_kv, first_k + start, N, DIM_PAD), wanted, DIM)
    v_tile = load_rows(row_pointers(v, b, h_kv, first_k + start, N, DIM_V_PAD), wanted, DIM_V)
    lo, hi, all_lo, all_hi = visible_range(
        start, tl.minimum(start + N, len_k), len_q, -shift, window.right, window.left
    )
    first, before, full, full_end, edges = split_range(lo, hi, all_lo, all_hi, M)
    dk_tile = tl.zeros([N, DIM_PAD], tl.float32)
    dv_tile = tl.zeros([N, DIM_V_PAD], tl.float32)
    for g in range(GROUP):
        h = h_kv * GROUP + g
        state = keys_range(
            (dk_tile, dv_tile, tl.zeros([N], tl.float32)), k_tile, v_tile, q, dout, lse, delta,
            b, h, cols[:, None], start, first_q, bounds, lo, hi, full, 0, 0, full_end - full,
            score, window, dropout,
            False, FOLD, PRECISION, M, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        )  # fmt: skip
        dk_tile, dv_tile, sums = keys_range(
            state, k_tile, v_tile, q, dout, lse, delta,
            b, h, cols[:, None], start, first_q, bounds, lo, hi,
            first, before, full_end - full, edges, score, window, dropout,
            True, FOLD, PRECISION, M, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        )  # fmt: skip
        if bias_sums is not None:
            tl.store(scalar_pointers(bias_sums, b, h, cols), sums, mask=wanted)
    if dropout is not None:
        dv_tile = dv_tile * dropout.factor
    dk_pointers = row_pointers(dk, b, h_kv, first_k + start, N, DIM_PAD)
    dv_pointers = row_pointers(dv, b, h_kv, first_k + start, N, DIM_V_PAD)
    store_rows(dk_pointers, dk_tile * scale, wanted, DIM)
    store_rows(dv_pointers, dv_tile, wanted, DIM_V)


@triton.jit
def queries_range(
    state, q_tile, do_tile, k, v, lse, delta, b, h, h_kv, i, first_k, bounds, lo, hi,
    first, before, jump, count, score, window, dropout,
    EDGE: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """Take `count` key tiles into (dq, sums of ds by query, whether a query saw any key)."""
    dq, sums, saw = state
    k_pointers = row_pointers(k, b, h_kv, first_k, N, DIM_PAD)
    v_pointers = row_pointers(v, b, h_kv, first_k, N, DIM_V_PAD)
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
        k_tile = load_rows(k_pointers + start.to(tl.int64) * k.row, wanted, DIM)
        v_tile = load_rows(v_pointers + start.to(tl.int64) * v.row, wanted, DIM_V)
        keep = True
        if dropout is not None:
            keep = keep_tile(dropout, b, h, i, start, q_tile.shape[0], N)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        _, ds, draw, visible = gradient_tile(
            product, dp, lse, delta, keep,
            score, window, dropout, b, h, i, cols[None, :], bounds, EDGE, FOLD,
        )  # fmt: skip
        if MASKED:
            k_tile = tl.where(seen(visible, 0)[:, None], k_tile, 0.0)
        if MASKED or EDGE:
            saw = saw | seen(visible, 1)
        else:
            saw = saw | True
        dq = tl.dot(draw.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
        if score.bias is not None:
            sums += tl.sum(ds, 1)
    return dq, sums, saw


@triton.jit(do_not_specialize=UNSPECIALISED)
def queries_kernel(
    q, k, v, dout, lse, delta, dlse, dq, sinks, sink_terms, bias_sums, score, window, dropout,
    scale, lengths, tile_list, tiles, heads, heads_per_row, heads_at_once,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """dq of M queries; what each adds to its head's dsink; bias_sums (B, Hq, Lq) of ds."""
    b, h, tile = place(
        tile_list, tiles, heads, heads_per_row, heads_at_once, window.right is not None
    )
    first_q, len_q, first_k, len_k = sequence_bounds(lengths, b)
    shift = alignment(len_q, len_k, BOTTOM_RIGHT)
    bounds = (len_q, len_k, shift)
    start = tile * M
    rows = start + tl.arange(0, M)
    wanted = rows < len_q
    q_tile = load_rows(row_pointers(q, b, h, first_q + start, M, DIM_PAD), wanted, DIM)
    do_tile = load_rows(row_pointers(dout, b, h, first_q + start, M, DIM_V_PAD), wanted, DIM_V)
    row_lse = tl.load(scalar_pointers(lse, b, h, first_q + rows), mask=wanted, other=INF)
    row_delta = tl.load(scalar_pointers(delta, b, h, first_q + rows), mask=wanted, other=0.0)
    lo, hi, all_lo, all_hi = visible_range(
        start, tl.minimum(start + M, len_q), len_k, shift, window.left, window.right
    )
    first, before, full, full_end, edges = split_range(lo, hi, all_lo, all_hi, N)
    nothing = tl.zeros([M], tl.float32)
    state = queries_range(
        (tl.zeros([M, DIM_PAD], tl.float32), nothing, nothing != 0), q_tile, do_tile, k, v,
        (row_lse * LOG2E)[:, None], row_delta[:, None], b, h, h // GROUP, rows[:, None], first_k,
        bounds, lo, hi, full, 0, 0, full_end - full, score, window, dropout,
        False, FOLD, PRECISION, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
    )  # fmt: skip
    dq_tile, sums, saw = queries_range(
        state, q_tile, do_tile, k, v,
        (row_lse * LOG2E)[:, None], row_delta[:, None], b, h, h // GROUP, rows[:, None], first_k,
        bounds, lo, hi, first, before, full_end - full, edges, score, window, dropout,
        True, FOLD, PRECISION, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
    )  # fmt: skip
    store_rows(row_pointers(dq, b, h, first_q + start, M, DIM_PAD), dq_tile * scale, wanted, DIM)
    if bias_sums is not None:
        tl.store(scalar_pointers(bias_sums, b, h, rows), sums, mask=wanted)
    if sink_terms is not None:
        own = nothing
        if dlse is not None:
            own = tl.load(scalar_pointers(dlse, b, h, first_q + rows), mask=wanted, other=0.0)
        # A row that sees nothing has an out of 0, whatever its dout holds.
        upstream = tl.where(saw, -row_delta, own)
        p_sink = tl.exp2((tl.load(sinks + h).to(tl.float32) - row_lse) * LOG2E)
        terms = tl.where(row_lse == -INF, 0.0, p_sink * upstream)
        tl.store(scalar_pointers(sink_terms, b, h, first_q + rows), terms, mask=wanted)


def keys_call(
    problem: Problem,
    x: Inputs,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    found: tuple[torch.Tensor, torch.Tensor],
    bias_sums: torch.Tensor | None,
    config: Config,
) -> Call:
    """Writes dk and dv (`found`), and bias_sums (B, Hq, Lk); rows are dout, lse, delta."""
    packed, (dout, lse, delta), (dk, dv) = problem.packed, rows, found
    score = args.score(problem, x)
    grid = args.key_grid(problem, config.n, x.q.device)
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed),
        args.rows(dout, packed), args.scalars(lse, packed), args.scalars(delta, packed),
        args.rows(dk, packed), args.rows(dv, packed),
        None if bias_sums is None else args.scalars(bias_sums, False),
        score, args.window(problem), args.dropout(problem), args.float32(problem.scale),
        args.lengths(problem, x.q.device), *grid.arguments,
    )  # fmt: skip
    constants = args.constants(problem) | {"FOLD": args.folds(score), "M": config.m, "N": config.n}
    return Call(keys_kernel, grid.programs, positional, constants, config)


def queries_call(
    problem: Problem,
    x: Inputs,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dlse: torch.Tensor | None,
    dq: torch.Tensor,
    sink_terms: torch.Tensor | None,
    bias_sums: torch.Tensor | None,
    config: Config,
) -> Call:
    """Writes dq, sink_terms (like lse) and bias_sums (B, Hq, Lq); rows are dout, lse, delta."""
    packed, (dout, lse, delta) = problem.packed, rows
    score = args.score(problem, x)
    grid = args.query_grid(problem, config.m, x.q.device)
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed),
        args.rows(dout, packed), args.scalars(lse, packed), args.scalars(delta, packed),
        None if dlse is None else args.scalars(dlse, packed), args.rows(dq, packed),
        args.sinks(x), None if sink_terms is None else args.scalars(sink_terms, packed),
        None if bias_sums is None else args.scalars(bias_sums, False),
        score, args.window(problem), args.dropout(problem), args.float32(problem.scale),
        args.lengths(problem, x.q.device), *grid.arguments,
    )  # fmt: skip
    constants = args.constants(problem) | {"FOLD": args.folds(score), "M": config.m, "N": config.n}
    return Call(queries_kernel, grid.programs, positional, constants, config)

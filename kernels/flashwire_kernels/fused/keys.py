"""dK and dV: a program per tile of keys, which takes the queries of all heads that share them.

Every sum is taken within one program, in a fixed order: no atomics. Tiles are keys by queries, so
that p and ds go from registers into the next product as they are. Where both sums together would
not fit into registers, each has a launch of its own.
"""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.arguments import Dropout, Lengths, Window
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.gradients import (
    described,
    ds_tile,
    head_index,
    in_sight,
    load_numbers,
    p_tile,
    within_sight,
)
from flashwire_kernels.fused.primitives import (
    alignment,
    contiguous_rows,
    keep_tile,
    load_rows,
    number_index,
    place,
    row_pointers,
    seen,
    sequence_bounds,
    split_range,
    store_rows,
    tile_of_rows,
    visible_range,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


@triton.jit
def keys_range(
    state, k_tile, v_tile, queries, place_of, tiles, score, window, dropout,
    EDGE: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """Take query tiles of a head into state: (dk, dv, sums of ds by key); dk and the sums only if
    WANT_K, dv only if WANT_V.

    queries   (q, dout, pointers to the first lse and delta, descriptors of q and dout or None,
              origin: (b, head, first row))
    place_of  (b, h, first key, all N, Lq, Lk, alignment)
    tiles     (lo, hi, first, before, jump, count): `count` tiles, from `first` on `before` of them
              and the others from there + `jump`; queries in [lo, hi) are wanted
    """
    dk, dv, sums = state
    q, dout, lse, delta, q_tiles, do_tiles, origin = queries
    b, h, start_n, j, len_q, len_k, shift = place_of
    lo, hi, first, before, jump, count = tiles
    q_pointers = row_pointers(q, b, h, origin[2], M, DIM_PAD)
    do_pointers = row_pointers(dout, b, h, origin[2], M, DIM_V_PAD)
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    BAND: tl.constexpr = (
        window.left is not None or window.right is not None or score.slopes is not None
    )
    # Queries that are not wanted are 0, and so are their numbers: that is enough to hide them, but
    # that ALiBi might yet make their p infinite.
    length = None
    if score.slopes is not None:
        length = len_q
    for n in range(count):
        tile = first + n
        if EDGE:
            tile += tl.where(n < before, 0, jump)
        start = tl.multiple_of(tile * M, M)
        rows = start + tl.arange(0, M)
        wanted = None
        if EDGE:
            wanted = (rows >= lo) & (rows < hi)
        q_tile = tile_of_rows(q_pointers, q.row, q_tiles, origin, start, wanted, DIM)
        do_tile = tile_of_rows(do_pointers, dout.row, do_tiles, origin, start, wanted, DIM_V)
        # Each row's numbers are loaded where they are used: sooner, they would fill registers.
        product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        row_lse = load_numbers(lse + rows, wanted)
        if WANT_K:
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            row_delta = load_numbers(delta + rows, wanted)[None, :]
        keep = True
        if dropout.key0 is not None:
            keep = tl.trans(keep_tile(dropout, b, h, rows[:, None], start_n, M, N))
        in_band = None
        if EDGE and BAND:
            in_band = in_sight(j, start, length, -shift, window.right, window.left, M)
        p, visible, steepness = p_tile(
            product, row_lse[None, :], in_band, score, window, b, h, rows[None, :], j[:, None],
            len_q, len_k, shift, EDGE, FOLD,
        )  # fmt: skip
        if MASKED:
            some = seen(visible, 0)[:, None]
            q_tile = tl.where(some, q_tile, 0.0)
            do_tile = tl.where(some, do_tile, 0.0)
        if WANT_V:
            kept = p
            if dropout.key0 is not None:
                kept = tl.where(keep, p, 0.0)
            dv = tl.dot(kept.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        if WANT_K:
            ds, draw = ds_tile(p, dp, row_delta, keep, visible, steepness, score, dropout)
            dk = tl.dot(draw.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
            if score.bias is not None:
                sums += tl.sum(ds, 1)
    return dk, dv, sums


@triton.jit(do_not_specialize=[*UNSPECIALISED, "span"])
def keys_kernel(
    q, k, v, dout, lse, delta, span, q_tiles, do_tiles, dk, dv, bias_sums, score, scale,
    left, right, key0, key1, threshold, kept_factor, len_q, len_k, offsets_q, offsets_k,
    tile_list, tiles, heads, heads_per_row, heads_at_once,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys, over the heads that share them, or one of the two, the other being None;
    bias_sums (B, Hq, Lk) of ds, with dk.
    """
    window, dropout = Window(left, right), Dropout(key0, key1, threshold, kept_factor)
    lengths = Lengths(len_q, len_k, offsets_q, offsets_k)
    b, h_kv, tile = place(tile_list, tiles, heads, heads_per_row, heads_at_once, False)
    first_q, own_q, first_k, own_k = sequence_bounds(lengths, b)
    shift = alignment(own_q, own_k, BOTTOM_RIGHT)
    PACKED: tl.constexpr = lengths.offsets_q is not None
    row_of_queries = b
    if PACKED:
        row_of_queries = b * 0
    heads_q = heads_per_row * GROUP
    start = tile * N
    cols = start + tl.arange(0, N)
    wanted = cols < own_k
    seen_by_some = wanted & within_sight(cols, own_q, -shift, window.right, window.left)
    k_pointers = row_pointers(k, b, h_kv, first_k + start, N, DIM_PAD)
    v_pointers = row_pointers(v, b, h_kv, first_k + start, N, DIM_V_PAD)
    k_tile = load_rows(k_pointers, seen_by_some, DIM)
    v_tile = load_rows(v_pointers, seen_by_some, DIM_V)
    lo, hi, all_lo, all_hi = visible_range(
        start, tl.minimum(start + N, own_k), own_q, -shift, window.right, window.left
    )
    if score.mask is not None or score.bias is not None:
        # Tiles that are not edges read masks and biases whole.
        all_hi = tl.where(start + N > own_k, all_lo, all_hi)
    first, before, full, full_end, edges = split_range(lo, hi, all_lo, all_hi, M)
    WANT_K: tl.constexpr = dk is not None
    WANT_V: tl.constexpr = dv is not None
    dk_tile = tl.zeros([N, DIM_PAD if WANT_K else 1], tl.float32)
    dv_tile = tl.zeros([N, DIM_V_PAD if WANT_V else 1], tl.float32)
    for g in range(GROUP):
        h = h_kv * GROUP + g
        at = head_index(b, h, heads_q, span, PACKED) + first_q
        origin = (row_of_queries, h, first_q)
        queries = (q, dout, lse + at, delta + at, q_tiles, do_tiles, origin)
        place_of = (b, h, start, cols, own_q, own_k, shift)
        state = keys_range(
            (dk_tile, dv_tile, tl.zeros([N], tl.float32)), k_tile, v_tile, queries, place_of,
            (lo, hi, full, 0, 0, full_end - full), score, window, dropout,
            False, WANT_K, WANT_V, FOLD, PRECISION, M, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        )  # fmt: skip
        dk_tile, dv_tile, sums = keys_range(
            state, k_tile, v_tile, queries, place_of,
            (lo, hi, first, before, full_end - full, edges), score, window, dropout,
            True, WANT_K, WANT_V, FOLD, PRECISION, M, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        )  # fmt: skip
        if bias_sums is not None:
            index = number_index(b, h, cols, heads_q, lengths.k, False)
            tl.store(bias_sums + index, sums, mask=wanted)
    if WANT_K:
        dk_rows = contiguous_rows(dk, heads_per_row, lengths.k, DIM, PACKED)
        dk_pointers = row_pointers(dk_rows, b, h_kv, first_k + start, N, DIM_PAD)
        store_rows(dk_pointers, dk_tile * scale, wanted, DIM)
    if WANT_V:
        if dropout.key0 is not None:
            dv_tile = dv_tile * dropout.factor
        dv_rows = contiguous_rows(dv, heads_per_row, lengths.k, DIM_V, PACKED)
        dv_pointers = row_pointers(dv_rows, b, h_kv, first_k + start, N, DIM_V_PAD)
        store_rows(dv_pointers, dv_tile, wanted, DIM_V)


def keys_calls(
    problem: Problem,
    x: Inputs,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    found: tuple[torch.Tensor, torch.Tensor],
    bias_sums: torch.Tensor | None,
    config: Config,
) -> list[Call]:
    """Write dk and dv (`found`), and bias_sums (B, Hq, Lk), all contiguous. rows: dout, and what
    the delta kernel wrote.
    """
    packed, (dout, lse, delta) = problem.packed, rows
    score = args.score(problem, x)
    grid = args.key_grid(problem, config.n, x.q.device)
    before = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed),
        args.rows(dout, packed), lse, delta, lse.shape[-1],
        *described((x.q, dout), packed, config.m, config),
    )  # fmt: skip
    after = (
        score, args.float32(problem.scale), *args.ungrouped(problem, x.q.device), *grid.arguments,
    )  # fmt: skip
    dk, dv = found
    together = ((dk, dv, bias_sums),)
    launches = ((dk, None, bias_sums), (None, dv, None)) if config.apart else together
    constants = args.constants(problem) | {"FOLD": args.folds(score), "M": config.m, "N": config.n}
    return [
        Call(keys_kernel, grid.programs, (*before, *written, *after), constants, config)
        for written in launches
    ]

"""The forward kernel: a program per tile of queries of one head, online softmax over key tiles.

Head dimensions are taken in slices of columns: of queries and keys WIDTH of them at a time, summed
up in the product; of values and results WIDTH_V. Short slices keep what a warp holds of a tile in
registers, and waste less of a head dimension that is no power of two.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.arguments import Dropout, Lengths, Window
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.infinite import infinite_between
from flashwire_kernels.fused.primitives import (
    INF,
    LN2,
    alignment,
    described_tile,
    exp_of,
    in_units,
    keep_tile,
    load_rows,
    number_index,
    place,
    row_pointers,
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
    s, m, l, factor,
    GUARD: tl.constexpr, FOLD: tl.constexpr, WATCH: tl.constexpr, FLOATS: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """One tile of an online softmax: (p, correction of what came before, new m, new l).

    m is the largest score of a row so far, and l the sum of p relative to it.
    GUARD: rows may have seen nothing. WATCH: a product of -inf, which would vanish in exp2, makes l
    NaN. It is the least and, as an unsigned integer, the largest; times 0 others are 0. sm_90 finds
    the largest of three integers in one instruction, sm_100 the least of three FLOATS, too.
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
        p = exp_of(s - base[:, None], NATURAL)
    correction = exp_of(m - base, NATURAL)
    l = l * correction + tl.sum(p, 1)
    if WATCH:
        if FLOATS:
            least = tl.min(s, 1)
        else:
            least = tl.max(s.to(tl.uint32, bitcast=True), 1).to(tl.float32, bitcast=True)
        l += least * 0.0
    return p, correction, m_new, l


@triton.jit
def key_slice(t, pointers, tiles, origin, start, wanted, c: tl.constexpr, DIM: tl.constexpr):
    """Slice c of the rows of a tile of keys or values, from row `start` of the sequence on: by
    descriptor where there is one and all rows are wanted.
    """
    N: tl.constexpr = pointers.shape[0]
    WIDTH: tl.constexpr = pointers.shape[1]
    if tiles is None or wanted is not None:
        moved = pointers + (start.to(tl.int64) * t.row + c * WIDTH * tl.cast(t.dim, tl.int64))
        return load_rows(moved, wanted, DIM - c * WIDTH)
    else:
        return described_tile(tiles, origin, start, N, WIDTH, c * WIDTH)


@triton.jit
def attend(
    state, q, keys, place_of, tiles, score, window, dropout,
    EDGE: tl.constexpr, FOLD: tl.constexpr, WATCH: tl.constexpr, FLOATS: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Take key tiles into state: (acc by slices, l, m).

    keys      (k, v, their descriptors or None, origin: (b, head, first row) of the sequence)
    place_of  (b, h, rows (M, 1), Lq, Lk, alignment) of the queries
    tiles     (lo, hi, first, before, jump, count): `count` tiles, from `first` on `before` of them
              and the others from there + `jump`; keys in [lo, hi) are wanted
    """
    acc, l, m = state
    k, v, k_tiles, v_tiles, origin = keys
    b, h, i, len_q, len_k, shift = place_of
    lo, hi, first, before, jump, count = tiles
    k_pointers = row_pointers(k, origin[0], origin[1], origin[2], N, WIDTH)
    v_pointers = row_pointers(v, origin[0], origin[1], origin[2], N, WIDTH_V)
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
        k_tile = key_slice(k, k_pointers, k_tiles, origin, start, wanted, 0, DIM)
        product = tl.dot(q[0], tl.trans(k_tile), input_precision=PRECISION)
        for c in tl.static_range(1, len(q)):
            k_tile = key_slice(k, k_pointers, k_tiles, origin, start, wanted, c, DIM)
            product = tl.dot(q[c], tl.trans(k_tile), product, input_precision=PRECISION)
        s, visible, _ = score_tile(
            product, score, window, b, h, i, cols[None, :], len_q, len_k, shift, EDGE, FOLD
        )
        p, correction, m, l = softmax_step(
            s, m, l, score.factor, EDGE or MASKED, FOLD, WATCH and not (EDGE or MASKED), FLOATS,
            score.bias is not None,
        )  # fmt: skip
        if dropout.key0 is not None:
            p = tl.where(keep_tile(dropout, b, h, i, start, M, N), p, 0.0)
        p = p.to(q[0].dtype)
        new_acc = ()
        for c in tl.static_range(len(acc)):
            v_tile = key_slice(v, v_pointers, v_tiles, origin, start, wanted, c, DIM_V)
            if MASKED:
                v_tile = tl.where(seen(visible, 0)[:, None], v_tile, 0.0)
            scaled = acc[c] * correction[:, None]
            new_acc += (tl.dot(p, v_tile, scaled, input_precision=PRECISION),)
        acc = new_acc
    return acc, l, m


@triton.jit
def attend_range(
    q, keys, place_of, infinite, first_row, last_row, first_key, last_key, m, l,
    score, window, dropout, lengths, heads_kv,
    FOLD: tl.constexpr, FLOATS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EDGE_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """(acc by slices, l, m) of rows [first_row, last_row) over the keys in [first_key, last_key)
    they see: first tiles of N keys that every row sees whole, then the edges, EDGE_N at a time.
    `infinite` counts the keys with an Inf or NaN up to each, or is None. For `keys` and `place_of`
    see attend.
    """
    WATCH: tl.constexpr = FOLD and infinite is None
    len_k, shift = place_of[4], place_of[5]
    lo, hi, all_lo, all_hi = visible_range(
        first_row, last_row, len_k, shift, window.left, window.right
    )
    lo, hi = tl.maximum(lo, first_key), tl.minimum(hi, last_key)
    all_lo, all_hi = tl.maximum(all_lo, first_key), tl.minimum(all_hi, last_key)
    PARTS: tl.constexpr = N // EDGE_N
    first, before, full, full_end, edges = split_range(lo, hi, all_lo, all_hi, N, PARTS)
    if infinite is not None:
        spoiled = infinite_between(infinite, keys[4], full * N, full_end * N, lengths, heads_kv)
        spoiled |= have_infinite(q) & (full_end > full)
        l = tl.where(spoiled, float("nan"), l)
    acc = ()
    for _ in tl.static_range((DIM_V + WIDTH_V - 1) // WIDTH_V):
        acc += (tl.zeros([M, WIDTH_V], tl.float32),)
    state = attend(
        (acc, l, m), q, keys, place_of, (lo, hi, full, 0, 0, full_end - full),
        score, window, dropout,
        False, FOLD, WATCH, FLOATS, PRECISION, M, N, DIM, DIM_V, WIDTH, WIDTH_V,
    )  # fmt: skip
    return attend(
        state, q, keys, place_of, (lo, hi, first, before, (full_end - full) * PARTS, edges),
        score, window, dropout,
        True, FOLD, False, FLOATS, PRECISION, M, EDGE_N, DIM, DIM_V, WIDTH, WIDTH_V,
    )  # fmt: skip


@triton.jit
def query_slices(pointers, step, wanted, DIM: tl.constexpr):
    """The wanted rows of queries by slices of as many columns as `pointers` has, which are `step`
    apart.
    """
    WIDTH: tl.constexpr = pointers.shape[1]
    slices = ()
    for c in tl.static_range((DIM + WIDTH - 1) // WIDTH):
        moved = pointers + c * WIDTH * tl.cast(step, tl.int64)
        slices += (load_rows(moved, wanted, DIM - c * WIDTH),)
    return slices


@triton.jit
def have_infinite(slices):
    """Which rows hold an Inf."""
    found = tl.max((tl.abs(slices[0].to(tl.float32)) == INF).to(tl.int32), 1)
    for c in tl.static_range(1, len(slices)):
        found |= tl.max((tl.abs(slices[c].to(tl.float32)) == INF).to(tl.int32), 1)
    return found != 0


@triton.jit
def row_totals(l, m, dropout, NATURAL: tl.constexpr):
    """(what to multiply acc by, lse) of rows; 0 and -inf where nothing was seen."""
    nothing = l == 0
    factor = 1.0
    if dropout.key0 is not None:
        factor = dropout.factor
    total = tl.log2(tl.where(nothing, 1.0, l))
    if NATURAL:
        lse = m + total * LN2
    else:
        lse = (m + total) * LN2
    lse = tl.where(nothing, -INF, lse)
    return factor / tl.where(nothing, 1.0, l), lse


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward_kernel(
    q, k, v, k_tiles, v_tiles, infinite, out, lse, sinks, score,
    left, right, key0, key1, threshold, kept_factor, len_q, len_k, offsets_q, offsets_k,
    tile_list, tiles, heads, heads_per_row, heads_at_once,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    FOLD: tl.constexpr, FLOATS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EDGE_N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """out and lse of M queries. Grid: (tiles * heads,), heads counting batch rows too."""
    window, dropout = Window(left, right), Dropout(key0, key1, threshold, kept_factor)
    lengths = Lengths(len_q, len_k, offsets_q, offsets_k)
    b, h, tile = place(
        tile_list, tiles, heads, heads_per_row, heads_at_once, window.right is not None
    )
    first_q, own_q, first_k, own_k = sequence_bounds(lengths, b)
    row_of_keys = b
    if lengths.offsets_k is not None:
        row_of_keys = b * 0
    start = tile * M
    rows = start + tl.arange(0, M)
    wanted = rows < own_q
    q_pointers = row_pointers(q, b, h, first_q + start, M, WIDTH)
    sink = -INF
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
    m = tl.zeros([M], tl.float32) + in_units(sink, score.bias is not None)
    l = tl.where(m == -INF, 0.0, 1.0)
    acc, l, m = attend_range(
        query_slices(q_pointers, q.dim, wanted, DIM),
        (k, v, k_tiles, v_tiles, (row_of_keys, h // GROUP, first_k)),
        (b, h, rows[:, None], own_q, own_k, alignment(own_q, own_k, BOTTOM_RIGHT)),
        infinite, start, tl.minimum(start + M, own_q), 0, own_k, m, l,
        score, window, dropout, lengths, heads_per_row // GROUP,
        FOLD, FLOATS, PRECISION, M, N, EDGE_N, DIM, DIM_V, WIDTH, WIDTH_V,
    )  # fmt: skip
    factor, row_lse = row_totals(l, m, dropout, score.bias is not None)
    index = number_index(
        b, h, first_q + rows, heads_per_row, lengths.q, lengths.offsets_q is not None
    )
    tl.store(lse + index, row_lse, mask=wanted)
    out_pointers = out + index[:, None] * DIM_V + tl.arange(0, WIDTH_V)[None, :]
    for c in tl.static_range(len(acc)):
        result = acc[c] * factor[:, None]
        store_rows(out_pointers + c * WIDTH_V, result, wanted, DIM_V - c * WIDTH_V)


def call(
    problem: Problem,
    x: Inputs,
    infinite: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: Config,
) -> Call:
    """Writes every row of out and lse, both contiguous, that belongs to a sequence.

    infinite: how many keys up to each, and with it, hold an Inf or NaN; None to watch for them.
    """
    packed, device = problem.packed, x.q.device
    score = args.score(problem, x)
    if infinite is None and args.folds(score):
        config = config.watching or config
    grid = args.query_grid(problem, config.m, device)
    widths = args.widths(problem, config)
    tiles: list[TensorDescriptor | None] = [None, None]
    if config.descriptors:
        tiles = [
            args.tiles(t, packed, config.n, width)
            for t, width in zip((x.k, x.v), widths.values(), strict=True)
        ]
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed), *tiles, infinite,
        out, lse, args.sinks(x), score, *args.ungrouped(problem, device), *grid.arguments,
    )  # fmt: skip
    constants = args.common(problem) | widths | {
        "FOLD": args.folds(score), "FLOATS": config.floats,
        "M": config.m, "N": config.n, "EDGE_N": config.edge or config.n,
    }  # fmt: skip
    return Call(forward_kernel, grid.programs, positional, constants, config)

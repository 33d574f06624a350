"""dQ: a program per tile of queries of one head, over the tiles of keys they see."""

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
    INF,
    alignment,
    contiguous_rows,
    exp_of,
    in_units,
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
def queries_range(
    state, q_tile, do_tile, row_lse, row_delta, keys, place_of, tiles, score, window, dropout,
    EDGE: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, WATCH: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """Take key tiles into state: (dq, sums of ds by query, which queries saw any key if WATCH).

    keys      (k, v, their descriptors or None, origin: (b, head, first row) of the sequence)
    place_of  (b, h, M queries, Lq, Lk, alignment)
    tiles     (lo, hi, first, before, jump, count): `count` tiles, from `first` on `before` of them
              and the others from there + `jump`; keys in [lo, hi) are wanted
    """
    dq, sums, saw = state
    k, v, k_tiles, v_tiles, origin = keys
    b, h, i, len_q, len_k, shift = place_of
    lo, hi, first, before, jump, count = tiles
    k_pointers = row_pointers(k, origin[0], origin[1], origin[2], N, DIM_PAD)
    v_pointers = row_pointers(v, origin[0], origin[1], origin[2], N, DIM_V_PAD)
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    for n in range(count):
        tile = first + n
        if EDGE:
            tile += tl.where(n < before, 0, jump)
        start = tl.multiple_of(tile * N, N)
        j = start + tl.arange(0, N)
        wanted = None
        if EDGE:
            wanted = (j >= lo) & (j < hi)
        k_tile = tile_of_rows(k_pointers, k.row, k_tiles, origin, start, wanted, DIM)
        v_tile = tile_of_rows(v_pointers, v.row, v_tiles, origin, start, wanted, DIM_V)
        keep = True
        if dropout.key0 is not None:
            keep = keep_tile(dropout, b, h, i[:, None], start, q_tile.shape[0], N)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        in_band = None
        if EDGE:
            in_band = in_sight(i, start, len_k, shift, window.left, window.right, N)
        p, visible, steepness = p_tile(
            product, row_lse[:, None], in_band, score, window, b, h, i[:, None], j[None, :],
            len_q, len_k, shift, EDGE, FOLD,
        )  # fmt: skip
        ds, draw = ds_tile(p, dp, row_delta[:, None], keep, visible, steepness, score, dropout)
        if MASKED:
            k_tile = tl.where(seen(visible, 0)[:, None], k_tile, 0.0)
        if WATCH:
            saw = saw | seen(visible, 1)
        dq = tl.dot(draw.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
        if score.bias is not None:
            sums += tl.sum(ds, 1)
    return dq, sums, saw


@triton.jit(do_not_specialize=[*UNSPECIALISED, "span"])
def queries_kernel(
    q, k, v, dout, k_tiles, v_tiles, lse, delta, span, dlse, dq, sinks, sink_terms, bias_sums,
    score, scale,
    left, right, key0, key1, threshold, kept_factor, len_q, len_k, offsets_q, offsets_k,
    tile_list, tiles, heads, heads_per_row, heads_at_once,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """dq of M queries; what each adds to its head's dsink; bias_sums (B, Hq, Lq) of ds."""
    window, dropout = Window(left, right), Dropout(key0, key1, threshold, kept_factor)
    lengths = Lengths(len_q, len_k, offsets_q, offsets_k)
    b, h, tile = place(
        tile_list, tiles, heads, heads_per_row, heads_at_once, window.right is not None
    )
    first_q, own_q, first_k, own_k = sequence_bounds(lengths, b)
    shift = alignment(own_q, own_k, BOTTOM_RIGHT)
    PACKED: tl.constexpr = lengths.offsets_k is not None
    row_of_keys = b
    if PACKED:
        row_of_keys = b * 0
    MASKED: tl.constexpr = score.mask is not None or score.bias is not None
    start = tile * M
    rows = start + tl.arange(0, M)
    wanted = rows < own_q
    seeing = wanted & within_sight(rows, own_k, shift, window.left, window.right)
    q_tile = load_rows(row_pointers(q, b, h, first_q + start, M, DIM_PAD), seeing, DIM)
    do_tile = load_rows(row_pointers(dout, b, h, first_q + start, M, DIM_V_PAD), seeing, DIM_V)
    at = head_index(b, h, heads_per_row, span, PACKED) + first_q + rows
    row_lse = load_numbers(lse + at, seeing)
    row_delta = load_numbers(delta + at, seeing)
    lo, hi, all_lo, all_hi = visible_range(
        start, tl.minimum(start + M, own_q), own_k, shift, window.left, window.right
    )
    if MASKED:
        # Tiles that are not edges read masks and biases whole.
        all_hi = tl.where(start + M > own_q, all_lo, all_hi)
    first, before, full, full_end, edges = split_range(lo, hi, all_lo, all_hi, N)
    WATCH: tl.constexpr = MASKED and sink_terms is not None
    nothing = tl.zeros([M], tl.float32)
    keys = (k, v, k_tiles, v_tiles, (row_of_keys, h // GROUP, first_k))
    place_of = (b, h, rows, own_q, own_k, shift)
    state = queries_range(
        (tl.zeros([M, DIM_PAD], tl.float32), nothing, nothing != 0), q_tile, do_tile,
        row_lse, row_delta, keys, place_of, (lo, hi, full, 0, 0, full_end - full),
        score, window, dropout,
        False, FOLD, PRECISION, WATCH, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
    )  # fmt: skip
    dq_tile, sums, saw = queries_range(
        state, q_tile, do_tile, row_lse, row_delta, keys, place_of,
        (lo, hi, first, before, full_end - full, edges), score, window, dropout,
        True, FOLD, PRECISION, WATCH, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
    )  # fmt: skip
    dq_rows = contiguous_rows(dq, heads_per_row, lengths.q, DIM, PACKED)
    dq_pointers = row_pointers(dq_rows, b, h, first_q + start, M, DIM_PAD)
    store_rows(dq_pointers, dq_tile * scale, wanted, DIM)
    if bias_sums is not None:
        sums_index = number_index(b, h, rows, heads_per_row, lengths.q, False)
        tl.store(bias_sums + sums_index, sums, mask=wanted)
    if sink_terms is not None:
        index = number_index(b, h, first_q + rows, heads_per_row, lengths.q, PACKED)
        own = nothing
        if dlse is not None:
            own = load_numbers(dlse + index, wanted)
        if not WATCH:
            saw = seeing
        # A row that sees nothing has an out of 0, whatever its dout holds.
        upstream = tl.where(saw, -row_delta, own)
        row_lse = load_numbers(lse + at, wanted)
        sink = in_units(tl.load(sinks + h).to(tl.float32), score.bias is not None)
        p_sink = exp_of(sink - row_lse, score.bias is not None)
        terms = tl.where(row_lse == -INF, 0.0, p_sink * upstream)
        tl.store(sink_terms + index, terms, mask=wanted)


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
    """Writes dq, sink_terms (like lse) and bias_sums (B, Hq, Lq), all contiguous. rows: dout, and
    what the delta kernel wrote.
    """
    packed, (dout, lse, delta) = problem.packed, rows
    score = args.score(problem, x)
    grid = args.query_grid(problem, config.m, x.q.device)
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed),
        args.rows(dout, packed), *described((x.k, x.v), packed, config.n, config),
        lse, delta, lse.shape[-1], None if dlse is None else dlse.contiguous(), dq,
        args.sinks(x), sink_terms, bias_sums,
        score, args.float32(problem.scale), *args.ungrouped(problem, x.q.device), *grid.arguments,
    )  # fmt: skip
    constants = args.constants(problem) | {"FOLD": args.folds(score), "M": config.m, "N": config.n}
    return Call(queries_kernel, grid.programs, positional, constants, config)

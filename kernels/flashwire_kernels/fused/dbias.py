"""The gradient of a bias with an entry per (query, key): a program per tile of the bias itself,
looping over the batch rows and heads that share it. No atomics, and nothing kept in between.
"""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.arguments import Dropout, Lengths, Window
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.gradients import ds_tile, head_index, load_numbers, p_tile
from flashwire_kernels.fused.primitives import (
    alignment,
    keep_tile,
    load_rows,
    row_pointers,
    sequence_bounds,
    visible_range,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem

_UNSPECIALISED = ["span", "bias_heads", "shared_rows", "shared_heads"]


@triton.jit
def sum_heads(
    total, rows_of, score, window, dropout, place_of, first_b, first_h, count, heads, heads_q,
    start_m, start_n,
    EDGE: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """total, and ds of one tile of `count` heads in order: `heads` from first_h on of each batch
    row from first_b on.

    rows_of   (q, k, v, dout, lse, delta, span of the last two)
    place_of  (first query row, Lq, first key row, Lk, alignment) of all of these heads
    """
    q, k, v, dout, lse, delta, span = rows_of
    first_q, len_q, first_k, len_k, shift = place_of
    rows, cols = start_m + tl.arange(0, M), start_n + tl.arange(0, N)
    wanted_q = None
    wanted_k = None
    if EDGE:
        wanted_q = rows < len_q
        wanted_k = cols < len_k
    for n in range(count):
        b, h = first_b + n // heads, first_h + n % heads
        h_kv = h // GROUP
        q_tile = load_rows(row_pointers(q, b, h, first_q + start_m, M, DIM_PAD), wanted_q, DIM)
        k_tile = load_rows(row_pointers(k, b, h_kv, first_k + start_n, N, DIM_PAD), wanted_k, DIM)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        do_pointers = row_pointers(dout, b, h, first_q + start_m, M, DIM_V_PAD)
        v_pointers = row_pointers(v, b, h_kv, first_k + start_n, N, DIM_V_PAD)
        do_tile = load_rows(do_pointers, wanted_q, DIM_V)
        v_tile = load_rows(v_pointers, wanted_k, DIM_V)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        at = head_index(b, h, heads_q, span, PACKED) + first_q + rows
        row_lse = load_numbers(lse + at, wanted_q)
        row_delta = load_numbers(delta + at, wanted_q)
        keep = True
        if dropout.key0 is not None:
            keep = keep_tile(dropout, b, h, rows[:, None], start_n, M, N)
        in_band = None
        p, visible, steepness = p_tile(
            product, row_lse[:, None], in_band, score, window, b, h, rows[:, None], cols[None, :],
            len_q, len_k, shift, EDGE, FOLD,
        )  # fmt: skip
        ds, _ = ds_tile(p, dp, row_delta[:, None], keep, visible, steepness, score, dropout)
        total += ds
    return total


@triton.jit
def share(place_of, window, start_m, start_n, M: tl.constexpr, N: tl.constexpr):
    """Whether something in a tile is visible, and whether all is."""
    _, len_q, _, len_k, shift = place_of
    lo, hi, all_lo, all_hi = visible_range(
        start_m, tl.minimum(start_m + M, len_q), len_k, shift, window.left, window.right
    )
    some = (start_m < len_q) & (start_n < hi) & (start_n + N > lo)
    whole = (start_m + M <= len_q) & (start_n >= all_lo) & (start_n + N <= all_hi)
    return some, some & whole


@triton.jit(do_not_specialize=[*UNSPECIALISED, *_UNSPECIALISED])
def bias_kernel(
    q, k, v, dout, lse, delta, span, dbias, score,
    left, right, key0, key1, threshold, kept_factor, len_q, len_k, offsets_q, offsets_k,
    bias_heads, shared_rows, shared_heads,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """dbias (bias batch, bias heads, Lq, Lk): each entry the sum over what shares it."""
    window, dropout = Window(left, right), Dropout(key0, key1, threshold, kept_factor)
    lengths = Lengths(len_q, len_k, offsets_q, offsets_k)
    pid = tl.program_id(0)
    tiles_n = (lengths.k + N - 1) // N
    tiles_m = (lengths.q + M - 1) // M
    start_n = pid % tiles_n * N
    start_m = pid // tiles_n % tiles_m * M
    own = pid // tiles_n // tiles_m
    own_b, own_h = own // bias_heads, own % bias_heads
    heads_q = bias_heads * shared_heads
    rows_of = (q, k, v, dout, lse, delta, span)
    PACKED: tl.constexpr = lengths.offsets_q is not None
    total = tl.zeros([M, N], tl.float32)
    # Of packed sequences each has its own bounds; dense rows share them, and are taken at once.
    times, heads_each = shared_rows, shared_heads
    if not PACKED:
        times, heads_each = 1, shared_rows * shared_heads
    for n in range(times):
        first_q, own_q, first_k, own_k = sequence_bounds(lengths, own_b + n)
        place_of = (first_q, own_q, first_k, own_k, alignment(own_q, own_k, BOTTOM_RIGHT))
        some, whole = share(place_of, window, start_m, start_n, M, N)
        total = sum_heads(
            total, rows_of, score, window, dropout, place_of, own_b + n, own_h,
            tl.where(whole, heads_each, 0), shared_heads, heads_q, start_m, start_n,
            False, PACKED, GROUP, FOLD, PRECISION, M, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        )  # fmt: skip
        total = sum_heads(
            total, rows_of, score, window, dropout, place_of, own_b + n, own_h,
            tl.where(some & ~whole, heads_each, 0), shared_heads, heads_q, start_m, start_n,
            True, PACKED, GROUP, FOLD, PRECISION, M, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        )  # fmt: skip
    rows, cols = start_m + tl.arange(0, M), start_n + tl.arange(0, N)
    index = (own.to(tl.int64) * lengths.q + rows)[:, None] * lengths.k + cols[None, :]
    inside = (rows < lengths.q)[:, None] & (cols < lengths.k)[None, :]
    tl.store(dbias + index, total.to(dbias.dtype.element_ty), mask=inside)


def bias_config(problem: Problem, item_size: int) -> Config:
    """Tiles as large as any GPU's registers and shared memory hold, by their bytes per row."""
    row = (args.padded(problem.dim) + args.padded(problem.dim_v)) * item_size
    fit = (1 << (room // row).bit_length() - 1 for room in (32 << 10, 16 << 10))
    m, n = (max(16, min(most, rows)) for most, rows in zip((64, 32), fit, strict=True))
    return Config(m=m, n=n, warps=4, stages=2 if item_size == 2 else 1)


def bias_call(
    problem: Problem,
    x: Inputs,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dbias: torch.Tensor,
) -> Call:
    """Writes all of dbias, contiguous, of rank 4 with Lq and Lk of its own. rows: dout, and what
    the delta kernel wrote.
    """
    packed, (dout, lse, delta) = problem.packed, rows
    score = args.score(problem, x)
    config = bias_config(problem, x.q.element_size())
    bias_rows, bias_heads = dbias.shape[:2]
    tiles = -(-problem.len_q // config.m) * -(-problem.len_k // config.n)
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed),
        args.rows(dout, packed), lse, delta, lse.shape[-1], dbias, score,
        *args.ungrouped(problem, x.q.device), bias_heads,
        problem.batch // max(1, bias_rows), problem.heads_q // max(1, bias_heads),
    )  # fmt: skip
    constants = args.constants(problem) | {"FOLD": args.folds(score), "M": config.m, "N": config.n}
    return Call(bias_kernel, bias_rows * bias_heads * tiles, positional, constants, config)

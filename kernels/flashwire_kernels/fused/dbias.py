"""The gradient of a bias with an entry per (query, key): a program per tile of the bias itself,
looping over the batch rows and heads that share it. No atomics.
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
    alignment,
    keep_tile,
    load_rows,
    row_pointers,
    scalar_pointers,
    sequence_bounds,
    visible_range,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


@triton.jit
def ds_tile(
    q, k, v, dout, lse, delta, score, window, dropout, lengths, b, h, start_m, start_n,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """ds of one tile of (b, h), float32 (M, N); 0 where hidden or beyond the sequence."""
    first_q, len_q, first_k, len_k = sequence_bounds(lengths, b)
    shift = alignment(len_q, len_k, BOTTOM_RIGHT)
    rows = start_m + tl.arange(0, M)
    cols = start_n + tl.arange(0, N)
    seen = visible_range(
        start_m, tl.minimum(start_m + M, len_q), len_k, shift, window.left, window.right
    )
    ds = tl.zeros([M, N], tl.float32)
    if (start_m < len_q) & (start_n < seen[1]) & (start_n + N > seen[0]):
        wanted_q, wanted_k = rows < len_q, cols < len_k
        q_tile = load_rows(row_pointers(q, b, h, first_q + start_m, M, DIM_PAD), wanted_q, DIM)
        do_tile = load_rows(
            row_pointers(dout, b, h, first_q + start_m, M, DIM_V_PAD), wanted_q, DIM_V
        )
        h_kv = h // GROUP
        k_tile = load_rows(row_pointers(k, b, h_kv, first_k + start_n, N, DIM_PAD), wanted_k, DIM)
        v_tile = load_rows(
            row_pointers(v, b, h_kv, first_k + start_n, N, DIM_V_PAD), wanted_k, DIM_V
        )
        row_lse = tl.load(scalar_pointers(lse, b, h, first_q + rows), mask=wanted_q, other=INF)
        row_delta = tl.load(scalar_pointers(delta, b, h, first_q + rows), mask=wanted_q, other=0.0)
        keep = True
        if dropout is not None:
            keep = keep_tile(dropout, b, h, rows[:, None], start_n, M, N)
        found = gradient_tile(
            tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION),
            tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION),
            row_lse[:, None], row_delta[:, None], keep, None, score, window, dropout,
            b, h, rows[:, None], cols[None, :], len_q, len_k, shift, True, FOLD,
        )  # fmt: skip
        ds = found[1]
    return ds


@triton.jit(do_not_specialize=[*UNSPECIALISED, "bias_heads", "shared_rows", "shared_heads"])
def bias_kernel(
    q, k, v, dout, lse, delta, dbias, score, window, dropout, lengths,
    bias_heads, shared_rows, shared_heads,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """dbias (bias batch, bias heads, Lq, Lk): each entry the sum over what shares it."""
    pid = tl.program_id(0)
    tiles_n = (lengths.k + N - 1) // N
    tiles_m = (lengths.q + M - 1) // M
    start_n = pid % tiles_n * N
    start_m = pid // tiles_n % tiles_m * M
    own = pid // tiles_n // tiles_m
    own_b, own_h = own // bias_heads, own % bias_heads
    total = tl.zeros([M, N], tl.float32)
    for n in range(shared_rows * shared_heads):
        total += ds_tile(
            q, k, v, dout, lse, delta, score, window, dropout, lengths,
            own_b + n // shared_heads, own_h + n % shared_heads, start_m, start_n,
            GROUP, BOTTOM_RIGHT, FOLD, PRECISION, M, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        )  # fmt: skip
    rows, cols = start_m + tl.arange(0, M), start_n + tl.arange(0, N)
    base = dbias.ptr + own_b.to(tl.int64) * dbias.batch + own_h.to(tl.int64) * dbias.head
    pointers = (
        base + rows.to(tl.int64)[:, None] * dbias.row + cols.to(tl.int64)[None, :] * dbias.col
    )
    inside = (rows < lengths.q)[:, None] & (cols < lengths.k)[None, :]
    tl.store(pointers, total.to(dbias.ptr.dtype.element_ty), mask=inside)


def bias_call(
    problem: Problem,
    x: Inputs,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dbias: torch.Tensor,
    config: Config,
) -> Call:
    """Writes all of dbias, of rank 4 with Lq and Lk of its own; rows are dout, lse, delta."""
    packed, (dout, lse, delta) = problem.packed, rows
    score = args.score(problem, x)
    bias_rows, bias_heads = dbias.shape[:2]
    tiles = -(-problem.len_q // config.m) * -(-problem.len_k // config.n)
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed),
        args.rows(dout, packed), args.scalars(lse, packed), args.scalars(delta, packed),
        args.Pairs(dbias, *dbias.stride()), score, args.window(problem), args.dropout(problem),
        args.lengths(problem, x.q.device), bias_heads,
        problem.batch // max(1, bias_rows), problem.heads_q // max(1, bias_heads),
    )  # fmt: skip
    constants = args.constants(problem) | {"FOLD": args.folds(score), "M": config.m, "N": config.n}
    return Call(bias_kernel, bias_rows * bias_heads * tiles, positional, constants, config)

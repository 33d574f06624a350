"""Forward for few queries and many keys: programs share the keys, and their results are merged by
lse, exactly. A program takes all query heads of a key head at once, as rows of one tile.

The keys are cut at fixed places, so that a result does not depend on what else there is to compute.
"""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import MAX_DECODE_ROWS, Config
from flashwire_kernels.fused.forward import attend_range, normalise
from flashwire_kernels.fused.primitives import (
    INF,
    LN2,
    LOG2E,
    alignment,
    load_rows,
    nan_for_inf,
    row_pointers,
    scalar_pointers,
    sequence_bounds,
    store_rows,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


@triton.jit(do_not_specialize=[*UNSPECIALISED, "splits", "heads_kv"])
def decode_kernel(
    q, k, v, parts, parts_lse, score, window, dropout, lengths, splits, heads_kv,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """Attention of all queries of a key head's group over SPLIT keys: parts (splits * B, ...)."""
    pid = tl.program_id(0)
    split, bh = pid % splits, pid // splits
    b, h_kv = bh // heads_kv, bh % heads_kv
    first_q, len_q, first_k, len_k = sequence_bounds(lengths, b)
    shift = alignment(len_q, len_k, BOTTOM_RIGHT)
    packed_rows = tl.arange(0, M)
    per_head = tl.maximum(len_q, 1)
    wanted = packed_rows < GROUP * len_q
    h = h_kv * GROUP + tl.where(wanted, packed_rows // per_head, 0)
    # Rows of no query stand beyond the last one, where nothing is visible.
    i = tl.where(wanted, packed_rows % per_head, len_q)
    q_base = q.ptr + b.to(tl.int64) * q.batch
    q_rows = h.to(tl.int64) * q.head + (first_q + i).to(tl.int64) * q.row
    dims = tl.arange(0, DIM_PAD)
    q_tile = load_rows(q_base + q_rows[:, None] + dims[None, :] * q.dim, wanted, DIM)
    q_tile = nan_for_inf(q_tile.to(tl.float32)).to(q_tile.dtype)
    acc, l, m = attend_range(
        q_tile, k, v, None, None, None, (b, h_kv, first_k), b, h[:, None], i[:, None],
        0, len_q, (len_q, len_k, shift),
        tl.full([M], -INF, tl.float32), tl.zeros([M], tl.float32), score, window, dropout,
        FOLD, PRECISION, N, DIM, DIM_V, DIM_PAD, DIM_V_PAD,
        split * SPLIT, tl.minimum(len_k, (split + 1) * SPLIT),
    )  # fmt: skip
    result, lse = normalise(acc, l, m, dropout)
    row = h.to(tl.int64) * parts.head + (first_q + i).to(tl.int64) * parts.row
    base = parts.ptr + split.to(tl.int64) * parts.split + b.to(tl.int64) * parts.batch
    dims_v = tl.arange(0, DIM_V_PAD)
    store_rows(base + row[:, None] + dims_v[None, :], result, wanted, DIM_V)
    lse_base = parts_lse.ptr + split.to(tl.int64) * parts_lse.split
    lse_base += b.to(tl.int64) * parts_lse.batch
    lse_row = h.to(tl.int64) * parts_lse.head + (first_q + i).to(tl.int64) * parts_lse.row
    tl.store(lse_base + lse_row, lse, mask=wanted)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "splits", "heads_q"])
def merge_kernel(
    parts, parts_lse, out, lse, sinks, lengths, splits, heads_q,
    M: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """The union of a head's parts, and of its sink, in order of the keys."""
    pid = tl.program_id(0)
    b, h = pid // heads_q, pid % heads_q
    first_q, len_q, _, _ = sequence_bounds(lengths, b)
    rows = tl.arange(0, M)
    wanted = rows < len_q
    sink = -INF
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
    m = tl.zeros([M], tl.float32) + sink
    l = tl.where(m == -INF, 0.0, 1.0)
    acc = tl.zeros([M, DIM_V_PAD], tl.float32)
    part_pointers = row_pointers(parts, b, h, first_q, M, DIM_V_PAD)
    lse_pointers = scalar_pointers(parts_lse, b, h, first_q + rows)
    for _ in range(splits):
        part = load_rows(part_pointers, wanted, DIM_V)
        part_lse = tl.load(lse_pointers, mask=wanted, other=-INF)
        part_pointers += parts.split
        lse_pointers += parts_lse.split
        m_new = tl.maximum(m, part_lse)
        base = tl.where(m_new == -INF, 0.0, m_new)
        before, weight = tl.exp2((m - base) * LOG2E), tl.exp2((part_lse - base) * LOG2E)
        l = l * before + weight
        acc = acc * before[:, None] + part * weight[:, None]
        m = m_new
    nothing = l == 0
    total = tl.where(nothing, 1.0, l)
    row_lse = tl.where(nothing, -INF, m + tl.log2(total) * LN2)
    out_pointers = row_pointers(out, b, h, first_q, M, DIM_V_PAD)
    store_rows(out_pointers, acc / total[:, None], wanted, DIM_V)
    tl.store(scalar_pointers(lse, b, h, first_q + rows), row_lse, mask=wanted)


def serves(problem: Problem, config: Config) -> bool:
    """Whether there are few queries, and keys enough to share out."""
    rows = problem.len_q * problem.group
    return 0 < rows <= MAX_DECODE_ROWS and problem.len_k > config.split


def calls(
    problem: Problem, x: Inputs, out: torch.Tensor, lse: torch.Tensor, config: Config
) -> tuple[Call, Call]:
    """Write every row of out and lse that belongs to a sequence; to launch one after the other."""
    packed, splits = problem.packed, -(-problem.len_k // config.split)
    parts = lse.new_empty((splits, *out.shape))
    parts_lse = lse.new_empty((splits, *lse.shape))
    described = args.part_rows(parts, packed), args.part_scalars(parts_lse, packed)
    score = args.score(problem, x)
    lengths = args.lengths(problem, x.q.device)
    positional = (
        args.rows(x.q, packed), args.rows(x.k, packed), args.rows(x.v, packed), *described,
        score, args.window(problem), args.dropout(problem), lengths, splits, problem.heads_kv,
    )  # fmt: skip
    m = args.padded(problem.len_q * problem.group)
    constants = args.constants(problem) | {
        "FOLD": args.folds(score), "M": m, "N": config.n, "SPLIT": config.split,
    }  # fmt: skip
    programs = splits * problem.batch * problem.heads_kv
    decode = Call(decode_kernel, programs, positional, constants, config)
    merged = (
        *described, args.rows(out, packed), args.scalars(lse, packed), args.sinks(x), lengths,
        splits, problem.heads_q,
    )  # fmt: skip
    constants = {
        "M": args.padded(problem.len_q),
        "DIM_V": problem.dim_v,
        "DIM_V_PAD": args.padded(problem.dim_v),
    }
    merge = Call(merge_kernel, problem.batch * problem.heads_q, merged, constants, config)
    return decode, merge

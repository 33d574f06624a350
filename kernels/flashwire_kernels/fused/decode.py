"""Forward for few queries and many keys: programs share the keys, and their results are merged by
lse, exactly. A program takes all query heads of a key head at once, as rows of one tile.

The keys are cut at fixed places, and the parts of a row are summed up from its first one on, so
many at a time: a result does not depend on what else there is to compute.
"""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.arguments import Dropout, Lengths, Window
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import MAX_DECODE_ROWS, Config
from flashwire_kernels.fused.forward import attend_range, query_slices, row_totals
from flashwire_kernels.fused.primitives import (
    INF,
    LN2,
    LOG2E,
    alignment,
    number_index,
    sequence_bounds,
    store_rows,
    visible_range,
)
from flashwire_kernels.geometry import Band
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem

_MERGED_NUMBERS = 4096
"""What a merging program has in flight: 16 KiB, 32 numbers for each thread of 4 warps."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def decode_kernel(
    q, k, v, parts, parts_lse, score,
    left, right, key0, key1, threshold, kept_factor, len_q, len_k, offsets_q, offsets_k,
    splits, heads_kv, part_rows,
    GROUP: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    FOLD: tl.constexpr, FLOATS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Attention of all queries of a key head's group over SPLIT keys. Grid: (splits * B * Hkv,),
    where a sequence's first split is the first with a key that is seen.
    """
    window, dropout = Window(left, right), Dropout(key0, key1, threshold, kept_factor)
    lengths = Lengths(len_q, len_k, offsets_q, offsets_k)
    pid = tl.program_id(0)
    split, bh = pid % splits, pid // splits
    b, h_kv = bh // heads_kv, bh % heads_kv
    first_q, own_q, first_k, own_k = sequence_bounds(lengths, b)
    shift = alignment(own_q, own_k, BOTTOM_RIGHT)
    row_of_keys = b
    if lengths.offsets_k is not None:
        row_of_keys = b * 0
    grouped_rows = tl.arange(0, M)
    per_head = tl.maximum(own_q, 1)
    wanted = grouped_rows < GROUP * own_q
    h = h_kv * GROUP + tl.where(wanted, grouped_rows // per_head, 0)
    # Rows of no query stand beyond the last one, where nothing is visible.
    i = tl.where(wanted, grouped_rows % per_head, own_q)
    q_base = q.ptr + b.to(tl.int64) * q.batch
    q_rows = h.to(tl.int64) * q.head + (first_q + i).to(tl.int64) * q.row
    dims = tl.arange(0, WIDTH).to(tl.int64)
    q_pointers = q_base + q_rows[:, None] + dims[None, :] * q.dim
    lo, _, _, _ = visible_range(0, own_q, own_k, shift, window.left, window.right)
    first_key = (lo // SPLIT + split) * SPLIT
    acc, l, m = attend_range(
        query_slices(q_pointers, q.dim, wanted, DIM),
        (k, v, None, None, (row_of_keys, h_kv, first_k)),
        (b, h[:, None], i[:, None], own_q, own_k, shift),
        None, 0, own_q, first_key, tl.minimum(own_k, first_key + SPLIT),
        tl.full([M], -INF, tl.float32), tl.zeros([M], tl.float32),
        score, window, dropout, lengths, heads_kv,
        FOLD, FLOATS, PRECISION, M, N, N, DIM, DIM_V, WIDTH, WIDTH_V,
    )  # fmt: skip
    factor, lse = row_totals(l, m, dropout, score.bias is not None)
    packed: tl.constexpr = lengths.offsets_q is not None
    index = number_index(b, h, first_q + i, heads_kv * GROUP, lengths.q, packed)
    index += split.to(tl.int64) * part_rows
    tl.store(parts_lse + index, lse, mask=wanted)
    pointers = parts + index[:, None] * DIM_V + tl.arange(0, WIDTH_V)[None, :]
    for c in tl.static_range(len(acc)):
        store_rows(pointers + c * WIDTH_V, acc[c] * factor[:, None], wanted, DIM_V - c * WIDTH_V)


@triton.jit(do_not_specialize=UNSPECIALISED)
def merge_kernel(
    parts, parts_lse, out, lse, sinks, len_q, offsets_q, splits, heads_q, part_rows,
    AT_ONCE: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PAD: tl.constexpr,
):  # fmt: skip
    """The union of a row's parts, AT_ONCE of them at a time, and of its head's sink. Grid:
    (B * Hq * Lq,).
    """
    pid = tl.program_id(0)
    i, bh = pid % len_q, pid // len_q
    b, h = bh // heads_q, bh % heads_q
    first, own, _, _ = sequence_bounds(Lengths(len_q, len_q, offsets_q, offsets_q), b)
    if i < own:
        index = number_index(b, h, first + i, heads_q, len_q, offsets_q is not None)
        sink = -INF
        if sinks is not None:
            sink = tl.load(sinks + h).to(tl.float32)
        m = tl.zeros([1], tl.float32) + sink
        l = tl.where(m == -INF, 0.0, 1.0)
        acc = tl.zeros([DIM_V_PAD], tl.float32)
        dims = tl.arange(0, DIM_V_PAD)
        for start in range(0, splits, AT_ONCE):
            split = start + tl.arange(0, AT_ONCE)
            there = split < splits
            at = index + split.to(tl.int64) * part_rows
            part_lse = tl.load(parts_lse + at, mask=there, other=-INF)
            pointers = parts + at[:, None] * DIM_V + dims[None, :]
            part = tl.load(pointers, mask=there[:, None] & (dims < DIM_V)[None, :], other=0.0)
            m_new = tl.maximum(m, tl.max(part_lse, 0))
            base = tl.where(m_new == -INF, 0.0, m_new)
            before, weight = tl.exp2((m - base) * LOG2E), tl.exp2((part_lse - base) * LOG2E)
            l = l * before + tl.sum(weight, 0)
            acc = acc * before + tl.sum(part * weight[:, None], 0)
            m = m_new
        nothing = l == 0
        total = tl.where(nothing, 1.0, l)
        row_lse = tl.where(nothing, -INF, m + tl.log2(total) * LN2)
        values = (acc / total).to(out.dtype.element_ty)
        tl.store(out + index * DIM_V + dims, values, mask=dims < DIM_V)
        tl.store(lse + index + tl.arange(0, 1), row_lse)


def serves(problem: Problem, config: Config) -> bool:
    """Whether there are few queries, and keys enough to share out."""
    rows = problem.len_q * problem.group
    return 0 < rows <= MAX_DECODE_ROWS and problem.len_k > config.split


def calls(
    problem: Problem, x: Inputs, out: torch.Tensor, lse: torch.Tensor, config: Config
) -> tuple[Call, Call]:
    """Write every row of out and lse, both contiguous, that belongs to a sequence; to launch one
    after the other.
    """
    splits, score = _splits(problem, config.split), args.score(problem, x)
    parts = lse.new_empty((splits, *out.shape))
    parts_lse = lse.new_empty((splits, *lse.shape))
    free = args.ungrouped(problem, x.q.device)
    rows = (args.rows(t, problem.packed) for t in (x.q, x.k, x.v))
    positional = (
        *rows, parts, parts_lse, score, *free, splits, problem.heads_kv, lse.numel()
    )  # fmt: skip
    constants = args.common(problem) | args.widths(problem, config) | {
        "FOLD": args.folds(score), "FLOATS": config.floats,
        "M": args.padded(problem.len_q * problem.group), "N": config.n, "SPLIT": config.split,
    }  # fmt: skip
    programs = splits * problem.batch * problem.heads_kv
    decode = Call(decode_kernel, programs, positional, constants, config)
    len_q, _, offsets_q, _ = args.lengths(problem, x.q.device)
    merged = (
        parts, parts_lse, out, lse, args.sinks(x), len_q, offsets_q, splits, problem.heads_q,
        lse.numel(),
    )  # fmt: skip
    padded = args.padded(problem.dim_v)
    constants = {
        "AT_ONCE": _MERGED_NUMBERS // padded, "DIM_V": problem.dim_v, "DIM_V_PAD": padded,
    }  # fmt: skip
    programs = problem.batch * problem.heads_q * len_q
    return decode, Call(merge_kernel, programs, merged, constants, config)


def _splits(problem: Problem, split: int) -> int:
    """The most splits whose keys any sequence sees."""
    most = 0
    for len_q, len_k in problem.lengths:
        band = Band.of(problem.spec, len_q, len_k)
        lo, hi = band.any_range(0, len_q, len_k)
        most = max(most, -(-hi // split) - lo // split)
    return most

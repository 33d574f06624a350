"""Which keys hold an Inf or NaN, counted ahead of the forward.

A product of -inf would vanish in exp2, and the row that sees it stay finite. The forward can watch
for it, which takes an instruction per score, or have the keys counted, which reads them once more.
"""

import torch
import triton
import triton.language as tl

from flashwire_kernels.fused import arguments as args
from flashwire_kernels.fused.arguments import Lengths
from flashwire_kernels.fused.call import UNSPECIALISED, Call
from flashwire_kernels.fused.config import COUNT_FROM, Config
from flashwire_kernels.fused.primitives import (
    INF,
    load_rows,
    number_index,
    place,
    row_pointers,
    sequence_bounds,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


@triton.jit(do_not_specialize=UNSPECIALISED)
def infinite_kernel(
    k, found, len_k, offsets_k, tile_list, tiles, heads, heads_per_row, heads_at_once,
    N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """1 for every key with an Inf or NaN, 0 for others."""
    b, h, tile = place(tile_list, tiles, heads, heads_per_row, heads_at_once, False)
    lengths = Lengths(len_k, len_k, offsets_k, offsets_k)
    _, _, first, length = sequence_bounds(lengths, b)
    start = tile * N
    rows = start + tl.arange(0, N)
    wanted = rows < length
    keys = load_rows(row_pointers(k, b, h, first + start, N, DIM_PAD), wanted, DIM)
    finite = tl.abs(keys.to(tl.float32)) < INF
    spoiled = 1 - tl.min(finite.to(tl.int32), 1)
    index = number_index(b, h, first + rows, heads_per_row, len_k, offsets_k is not None)
    tl.store(found + index, spoiled, mask=wanted)


@triton.jit
def infinite_between(infinite, origin, first, last, lengths, heads_kv):
    """Whether any key of [first, last) of a sequence holds an Inf or NaN, by their counts."""
    b, h, start = origin
    PACKED: tl.constexpr = lengths.offsets_k is not None
    first, last = start + first, start + last
    before_at = infinite + number_index(b, h, first - 1, heads_kv, lengths.k, PACKED)
    upto_at = infinite + number_index(b, h, last - 1, heads_kv, lengths.k, PACKED)
    before = tl.load(before_at, mask=first > 0, other=0)
    if_any = last > first
    upto = tl.load(upto_at, mask=if_any, other=0)
    return if_any & (upto != before)


def counts(problem: Problem, x: Inputs) -> bool:
    """Whether to count: where products go into exp2 as they are, and rows are many. (A mask has
    them looked at one by one, and may hide what would be counted.)
    """
    plain = args.folds(args.score(problem, x)) and x.mask is None
    return plain and problem.len_q * problem.group >= COUNT_FROM


def count(problem: Problem, x: Inputs, config: Config) -> torch.Tensor:
    """How many keys of a sequence and head, up to each and with it, hold an Inf or NaN: int32,
    (B, Hkv, Lk) or (Tk, Hkv); there all sequences up to it count.
    """
    found = x.k.new_zeros(x.k.shape[:-1], dtype=torch.int32)
    call(problem, x, found, config).launch()
    return found.cumsum(0 if problem.packed else 2, dtype=torch.int32)


def call(problem: Problem, x: Inputs, found: torch.Tensor, config: Config) -> Call:
    """Writes a 1 or 0 per key into `found`, contiguous, wherever there is a sequence."""
    device = x.k.device
    grid = args.key_grid(problem, config.n, device)
    _, len_k, _, offsets_k = args.lengths(problem, device)
    positional = (args.rows(x.k, problem.packed), found, len_k, offsets_k, *grid.arguments)
    constants = {"N": config.n, "DIM": problem.dim, "DIM_PAD": args.padded(problem.dim)}
    return Call(infinite_kernel, grid.programs, positional, constants, config)

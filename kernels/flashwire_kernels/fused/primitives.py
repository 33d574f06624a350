"""Steps on tiles that the kernels share.

i and j are positions within a sequence, shaped to broadcast over a tile: (M, 1) and (1, N), or the
other way about where a kernel works on keys by queries.
"""

import triton
import triton.language as tl

from flashwire_kernels.fused.arguments import Rows

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_bounds(lengths, b):
    """(first query row, Lq, first key row, Lk) of a batch row or packed sequence."""
    if lengths.offsets_q is None:
        return 0, lengths.q, 0, lengths.k
    else:
        first_q = tl.load(lengths.offsets_q + b)
        len_q = (tl.load(lengths.offsets_q + b + 1) - first_q).to(tl.int32)
        first_k = tl.load(lengths.offsets_k + b)
        len_k = (tl.load(lengths.offsets_k + b + 1) - first_k).to(tl.int32)
        return first_q, len_q, first_k, len_k


@triton.jit
def tile_order(pid, tiles, heads, heads_at_once, HEAVY_LAST: tl.constexpr):
    """(tile, batch row and head) of a program: heads in groups whose keys share a cache; within a
    group, the tiles with most to do before the others.
    """
    group = pid // (tiles * heads_at_once)
    first = group * heads_at_once
    width = tl.minimum(heads_at_once, heads - first)
    within = pid - group * tiles * heads_at_once
    tile = within // width
    if HEAVY_LAST:
        tile = tiles - 1 - tile
    return tile, first + within % width


@triton.jit
def place(tile_list, tiles, heads, heads_per_row, heads_at_once, HEAVY_LAST: tl.constexpr):
    """(b, h, tile) of this program."""
    pid = tl.program_id(0)
    if tile_list is None:
        tile, bh = tile_order(pid, tiles, heads, heads_at_once, HEAVY_LAST)
        return bh // heads_per_row, bh % heads_per_row, tile
    else:
        listed = tile_list + pid // heads_per_row * 2
        return tl.load(listed), pid % heads_per_row, tl.load(listed + 1)


@triton.jit
def alignment(len_q, len_k, BOTTOM_RIGHT: tl.constexpr):
    """pos(i) - i."""
    if BOTTOM_RIGHT:
        return len_k - len_q
    else:
        return 0


@triton.jit
def visible_range(first, last, length, shift, left, right):
    """Keys [lo, hi) that some row of [first, last) sees, and [all_lo, all_hi) that every one does.

    Row i sees j when -left <= j - (i + shift) <= right; None is open (geometry.Band).
    """
    lo, hi = 0, length
    all_lo, all_hi = 0, length
    if left is not None:
        lo = tl.maximum(0, first + shift - left)
        all_lo = tl.maximum(0, last - 1 + shift - left)
    if right is not None:
        hi = tl.minimum(length, last + shift + right)
        all_hi = tl.minimum(length, first + shift + right + 1)
    return lo, hi, all_lo, all_hi


@triton.jit
def split_range(lo, hi, all_lo, all_hi, TILE: tl.constexpr, PARTS: tl.constexpr = 1):
    """Tiles that cover [lo, hi): (first, number that lie before the full ones, first full, first
    after the full ones, number of the two edges together). Full ones lie within [all_lo, all_hi).
    Edges are cut into PARTS tiles for one of the full ones; where none is full, all is one edge.
    """
    PART: tl.constexpr = TILE // PARTS
    end = tl.maximum((hi + TILE - 1) // TILE, 0)
    full = tl.minimum((all_lo + TILE - 1) // TILE, end)
    full_end = tl.maximum(tl.minimum(tl.maximum(all_hi, 0) // TILE, end), full)
    last = tl.maximum((hi + PART - 1) // PART, 0)
    first = tl.minimum(lo // PART, last)
    before = full * PARTS - first
    return first, before, full, full_end, before + last - full_end * PARTS


@triton.jit
def row_pointers(t, b, h, first, N: tl.constexpr, DIM_PAD: tl.constexpr):
    """Pointers (N, DIM_PAD) to the rows of a head from `first` on."""
    base = t.ptr + (b.to(tl.int64) * t.batch + h.to(tl.int64) * t.head)
    base += tl.cast(first, tl.int64) * t.row
    n = tl.arange(0, N).to(tl.int64)
    return base + n[:, None] * t.row + tl.arange(0, DIM_PAD).to(tl.int64)[None, :] * t.dim


@triton.jit
def load_rows(pointers, wanted, DIM: tl.constexpr):
    """Rows where `wanted` (N,), or all when it is None; 0 elsewhere, and beyond DIM."""
    DIM_PAD: tl.constexpr = pointers.shape[1]
    dims = tl.arange(0, DIM_PAD)[None, :] < DIM
    if wanted is None:
        if DIM >= DIM_PAD:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=dims, other=0.0)
    else:
        if DIM >= DIM_PAD:
            return tl.load(pointers, mask=wanted[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=wanted[:, None] & dims, other=0.0)


@triton.jit
def described_tile(
    tiles, origin, start, N: tl.constexpr, WIDTH: tl.constexpr, first_dim: tl.constexpr = 0
):
    """WIDTH columns of N rows from `start` on, by descriptor; 0 beyond the head dimension."""
    b, h, first = origin
    return tiles.load([b, h, (first + start).to(tl.int32), first_dim]).reshape([N, WIDTH])


@triton.jit
def tile_of_rows(pointers, step, tiles, origin, start, wanted, DIM: tl.constexpr):
    """The wanted rows of a tile from row `start` on, or all when `wanted` is None: then by
    descriptor, if there is one. pointers are to the first rows, which are `step` apart.
    """
    if tiles is None or wanted is not None:
        return load_rows(pointers + start.to(tl.int64) * step, wanted, DIM)
    else:
        return described_tile(tiles, origin, start, pointers.shape[0], pointers.shape[1])


@triton.jit
def store_rows(pointers, values, wanted, DIM: tl.constexpr):
    """Store rows where `wanted`, up to DIM."""
    DIM_PAD: tl.constexpr = pointers.shape[1]
    keep = wanted[:, None] & (tl.arange(0, DIM_PAD)[None, :] < DIM)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=keep)


@triton.jit
def scalar_pointers(t, b, h, rows):
    """Pointers to a head's numbers, one per row."""
    return t.ptr + b.to(tl.int64) * t.batch + h.to(tl.int64) * t.head + rows.to(tl.int64) * t.row


@triton.jit
def number_index(b, h, row, heads, length, PACKED: tl.constexpr):
    """Where the number of a head and row stands in a contiguous (B, H, L) or (T, H)."""
    if PACKED:
        return row.to(tl.int64) * heads + h
    else:
        return (b.to(tl.int64) * heads + h) * length + row


@triton.jit
def contiguous_rows(t, heads, length, DIM: tl.constexpr, PACKED: tl.constexpr):
    """Rows (arguments.Rows) of a contiguous (B, H, L, DIM) or (T, H, DIM)."""
    if PACKED:
        return Rows(t, 0, DIM, tl.cast(heads, tl.int64) * DIM, 1)
    else:
        head = tl.cast(length, tl.int64) * DIM
        return Rows(t, heads * head, head, DIM, 1)


@triton.jit
def pair_tile(t, b, h, i, j, inside, other):
    """The tile of a mask or bias at (b, h, i, j), `other` where not inside; None: all are."""
    base = t.ptr + b.to(tl.int64) * t.batch
    pointers = base + (h.to(tl.int64) * t.head + i.to(tl.int64) * t.row) + j.to(tl.int64) * t.col
    if inside is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=other)


@triton.jit
def slope_of(slopes, b, h):
    """ALiBi's slope; an infinite one is NaN."""
    pointers = slopes.ptr + b.to(tl.int64) * slopes.batch + h.to(tl.int64) * slopes.head
    slope = tl.load(pointers).to(tl.float32)
    return tl.where(tl.abs(slope) == INF, float("nan"), slope)


@triton.jit
def in_units(values, NATURAL: tl.constexpr):
    """What counts in units of e, in those of scores: NATURAL, or of log2 (arguments.Score)."""
    if NATURAL:
        return values
    else:
        return values * LOG2E


@triton.jit
def exp_of(difference, NATURAL: tl.constexpr):
    """exp of a difference of scores."""
    if NATURAL:
        return tl.exp2(difference * LOG2E)
    else:
        return tl.exp2(difference)


@triton.jit
def tanh(x):
    """tanh to float32's precision, of small x too."""
    z = x * x
    poly = -0.006276387405834566 * z + 0.021116213807226822
    poly = poly * z - 0.05387513815258958
    poly = poly * z + 0.133329240060464
    poly = poly * z - 0.33333330431333646
    small = x + x * (z * poly)
    size = tl.abs(x)
    large = 1 - 2 / (tl.exp2(size * LOG2E * 2) + 1)
    return tl.where(size < 0.6, small, tl.where(x < 0, -large, large))


@triton.jit
def nan_for_inf(x):
    """Infinities as NaN, which no later step can make finite again."""
    return tl.where(tl.abs(x) == INF, float("nan"), x)


@triton.jit
def score_tile(
    product, score, window, b, h, i, j, len_q, len_k, shift, EDGE: tl.constexpr, FOLD: tl.constexpr,
    GUARD: tl.constexpr = True,
):  # fmt: skip
    """(s, visible, steepness) of a tile of products q.k.

    s is in the units of `score`, -inf where hidden; with FOLD it has yet to be multiplied by the
    factor.
    steepness is d s / d (product * scale); it and visible are 1 and True of a tile without softcap
    and without anything hidden. An unmasked tile of plain scores passes as it is, infinities
    included; so does any without GUARD.
    """
    HIDES: tl.constexpr = EDGE or score.mask is not None or score.bias is not None
    steepness = 1.0
    visible = True
    s = product
    if GUARD and (HIDES or not FOLD):
        s = nan_for_inf(s)
    if not FOLD:
        s = s * score.factor
    if score.softcap is not None:
        t = tanh(s)
        steepness = 1 - t * t
        s = t * score.softcap
    if score.slopes is not None:
        slope = in_units(slope_of(score.slopes, b, h), score.bias is not None)
        s = s - slope * tl.abs(j - i - shift).to(tl.float32)
    inside = None
    if HIDES and (EDGE or GUARD):
        inside = (j < len_k) & (i < len_q)
        if EDGE and window.left is not None:
            inside &= j - i >= shift - window.left
        if EDGE and window.right is not None:
            inside &= j - i <= shift + window.right
        visible = inside
    if score.mask is not None:
        visible = visible & (pair_tile(score.mask, b, h, i, j, inside, 0) != 0)
    if score.bias is not None:
        bias = pair_tile(score.bias, b, h, i, j, inside, 0.0).to(tl.float32)
        visible = visible & (bias != -INF)
        s = s + bias
    if GUARD and HIDES:
        s = tl.where(visible, s, -INF)
    return s, visible, steepness


@triton.jit
def seen(visible, AXIS: tl.constexpr):
    """Which rows or columns of a tile have something visible."""
    return tl.max(visible.to(tl.int32), AXIS) != 0


@triton.jit
def keep_tile(dropout, b, h, i, first_j, M: tl.constexpr, N: tl.constexpr):
    """Which entries (M, N) survive dropout (philox.py); i is (M, 1), first_j a multiple of 4."""
    quad = (first_j // 4 + tl.arange(0, N // 4))[None, :] + tl.zeros([M, 1], tl.int32)
    c0 = quad.to(tl.uint32)
    c1 = (i + tl.zeros([M, N // 4], tl.int32)).to(tl.uint32)
    c2 = (h + tl.zeros([M, N // 4], tl.int32)).to(tl.uint32)
    c3 = (b + tl.zeros([M, N // 4], tl.int32)).to(tl.uint32)
    key0 = tl.cast(dropout.key0, tl.uint32, bitcast=True)
    key1 = tl.cast(dropout.key1, tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c3, key0, key1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([M, N])
    return words >= tl.cast(dropout.threshold, tl.uint32, bitcast=True)

"""Cutting a part into tiles of scores, and computing the scores of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashwire_kernels.cpu.hidden import relative, visible_by_position
from flashwire_kernels.cpu.part import LINE, Part
from flashwire_kernels.philox import keep_tile

SCORES_AT_ONCE = 1 << 18  # a tile and its products stay in the cores' caches
_FLOORS = {torch.float32: -87.0, torch.float64: -708.0}  # exp of these is still a normal number


@dataclass(frozen=True, slots=True)
class Lanes:
    """Some (batch row, key head) pairs that a tile is computed for at once.

    Either whole batch rows or some heads of one, so they are a range of the flat pairs as well.
    A single pair is computed twice over (`copies`), the second time for nothing: a matrix alone
    is multiplied by all threads together, with other bits than one among others.
    """

    batch: slice
    heads_q: slice
    flat: slice
    group: int
    copies: int

    @property
    def count(self) -> int:
        """Pairs, copies included: the first dimension of everything computed for these lanes."""
        return self.copies * len(range(self.flat.start, self.flat.stop))

    def queries(self, t: torch.Tensor, rows: slice) -> torch.Tensor:
        """Rows of a contiguous (B, Hq, Lq, D) as (count, group * rows, D)."""
        by_key_head = t.view(-1, self.group, *t.shape[2:])
        return self._copied(by_key_head[self.flat, :, rows].flatten(1, 2))

    def keys(self, t: torch.Tensor, keys: slice) -> torch.Tensor:
        """Keys of a contiguous (B, Hkv, Lk, D) as (count, keys, D)."""
        return self._copied(t.flatten(0, 1)[self.flat, keys])

    def put_queries(self, into: torch.Tensor, rows: slice, value: torch.Tensor) -> None:
        """Write what `queries` reads."""
        into[self.batch, self.heads_q, rows] = self.results(value, rows)

    def put_keys(self, into: torch.Tensor, keys: slice, value: torch.Tensor) -> None:
        """Write what `keys` reads."""
        into.flatten(0, 1)[self.flat, keys] = value[: self.count // self.copies]

    def by_head(self, t: torch.Tensor, rows: slice) -> torch.Tensor:
        """(count, group * rows, width) as (batch rows or copies, query heads, rows, width)."""
        heads = len(range(self.heads_q.start, self.heads_q.stop))
        return t.view(-1, heads, len(range(rows.start, rows.stop)), t.shape[2])

    def results(self, t: torch.Tensor, rows: slice) -> torch.Tensor:
        """`by_head` without copies."""
        return self.by_head(t, rows)[: len(range(self.batch.start, self.batch.stop))]

    def pairs(self, t: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        """The view of a 4-D tensor that broadcasts to (B, Hq, Lq, Lk), at a tile."""
        cuts = (self.batch, self.heads_q, rows, keys)
        return t[tuple(slice(None) if n == 1 else c for n, c in zip(t.shape, cuts, strict=True))]

    def _copied(self, t: torch.Tensor) -> torch.Tensor:
        return t if self.copies == 1 else t.expand(self.copies, -1, -1)


def lanes(part: Part, scores_per_lane: int) -> list[Lanes]:
    """All lanes of a part, as many at once as scratch memory allows."""
    batch, heads = part.k.shape[:2]
    group, at_once = part.group, max(1, SCORES_AT_ONCE // scores_per_lane)
    rows_at_once, heads_at_once = max(1, at_once // heads), min(heads, at_once)
    copies_alone = 1 if torch.get_num_threads() == 1 else 2
    found = []
    for b in range(0, batch, rows_at_once):
        last_b = min(b + rows_at_once, batch)
        for h in range(0, heads, heads_at_once):
            last_h = min(h + heads_at_once, heads)
            flat = slice(b * heads + h, (last_b - 1) * heads + last_h)
            copies = copies_alone if flat.stop - flat.start == 1 else 1
            heads_q = slice(h * group, last_h * group)
            found.append(Lanes(slice(b, last_b), heads_q, flat, group, copies))
    return found


def segments(
    seen_by_any: tuple[int, int],
    seen_by_all: tuple[int, int],
    length: int,
    size: int,
    grain: int,
) -> Iterator[tuple[int, int, bool]]:
    """Cut the visible range of a tile row into (first, last, whole) of at most `size`.

    Bounds are multiples of `grain`, but for `length` itself. Where the range does not fit into one
    segment, the part that everybody sees stands apart, whole: it needs no mask.
    """
    lo, hi = _down(seen_by_any[0], grain), min(length, _up(seen_by_any[1], grain))
    all_lo = _up(seen_by_all[0], grain)
    all_hi = length if seen_by_all[1] >= length else _down(seen_by_all[1], grain)
    if hi - lo <= size or all_lo >= all_hi:
        bounds = [(lo, hi, all_lo <= lo and hi <= all_hi)]
    else:
        bounds = [(lo, all_lo, False), (all_lo, all_hi, True), (all_hi, hi, False)]
    for first, last, whole in bounds:
        for start in range(first, last, size):
            yield start, min(start + size, last), whole


class Tiles:
    """Computes tiles of scores of one part in one piece of scratch memory."""

    def __init__(self, part: Part, queries: torch.Tensor, keys: torch.Tensor, largest: int) -> None:
        """queries is `scaled`, keys is part.k padded to whole lines; largest is in scores."""
        self._part = part
        self._queries, self._keys = queries, keys
        self._scratch = keys.new_empty(largest)
        self._caps: dict[tuple[int, int, int], torch.Tensor] = {}

    def scores(
        self,
        lane: Lanes,
        rows: slice,
        keys: slice,
        whole: bool,
        steepness: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """s of a tile, (count, group * rows, width) and -inf where hidden; overwrites the last.

        The width is the number of keys, rounded up to whole lines. `whole` says that position
        hides nothing here. d softcap(s) / d s is written to `steepness`, of s' shape.
        """
        part, wide = self._part, whole_lines(keys, self._keys.dtype)
        q, k = lane.queries(self._queries, rows), lane.keys(self._keys, wide)
        shape = (q.shape[0], q.shape[1], k.shape[1])
        s = torch.bmm(q, k.mT, out=self._scratch[: math.prod(shape)].view(shape))
        if part.softcap is not None:
            s.tanh_()
            if steepness is not None:
                torch.mul(s, s, out=steepness).neg_().add_(1)
            s.mul_(part.softcap)
        real = keys.stop - keys.start
        by_head = lane.by_head(s, rows)[..., :real]
        self._add(lane, by_head, rows, keys)
        self._hide(lane, by_head, rows, keys, whole)
        s[..., real:] = -math.inf
        return s

    def kept(self, lane: Lanes, rows: slice, keys: slice, width: int) -> torch.Tensor:
        """Which entries of a tile dropout keeps, boolean, (count / copies, group * rows, width)."""
        dropout = self._part.dropout
        if dropout is None:
            raise ValueError("this part has no dropout")
        row, key = dropout.first_row + rows.start, dropout.first_key + keys.start
        keep = keep_tile(
            dropout.seed,
            dropout.p,
            batch=dropout.index[lane.batch],
            heads=range(lane.heads_q.start, lane.heads_q.stop),
            rows=range(row, row + rows.stop - rows.start),
            cols=range(key, key + width),
        )
        return keep.reshape(lane.count // lane.copies, -1, width)

    def _add(self, lane: Lanes, s: torch.Tensor, rows: slice, keys: slice) -> None:
        """ALiBi and bias."""
        part = self._part
        if part.slopes is not None:
            slopes = lane.pairs(part.slopes, rows, keys)
            i, j = range(rows.start, rows.stop), range(keys.start, keys.stop)
            distance = relative(part.band, i, j, s.device).abs_().to(s.dtype)
            s.addcmul_(slopes, distance, value=-1)
        if part.bias is not None:
            s.add_(lane.pairs(part.bias, rows, keys).to(s.dtype))

    def _hide(self, lane: Lanes, s: torch.Tensor, rows: slice, keys: slice, whole: bool) -> None:
        """-inf where mask or position hides, and where bias does unless adding it has done so."""
        part = self._part
        if part.mask is not None:
            mask = lane.pairs(part.mask, rows, keys)
            if part.careful:
                s.masked_fill_(~mask, -math.inf)
            else:
                torch.minimum(s, _cap(mask, s.dtype), out=s)
        if part.bias is not None and part.careful:
            s.masked_fill_(lane.pairs(part.bias, rows, keys) == -math.inf, -math.inf)
        if whole:
            return
        cap = self._position_cap(rows, keys, s.dtype)
        if part.careful:
            s.masked_fill_(cap == -math.inf, -math.inf)
        else:
            torch.minimum(s, cap, out=s)

    def _position_cap(self, rows: slice, keys: slice, dtype: torch.dtype) -> torch.Tensor:
        """+inf where position lets a row see a key, else -inf; remembered for tiles alike."""
        i, j = range(rows.start, rows.stop), range(keys.start, keys.stop)
        alike = (keys.start - rows.start, len(i), len(j))
        if alike not in self._caps:
            visible = visible_by_position(self._part.band, i, j, self._keys.device)
            self._caps = {alike: _cap(visible, dtype)}
        return self._caps[alike]


def scaled(part: Part) -> torch.Tensor:
    """q times what its scores are multiplied by before softcap's tanh, or anything else."""
    return part.q * (part.scale if part.softcap is None else part.scale / part.softcap)


def whole_lines(keys: slice, dtype: torch.dtype) -> slice:
    """keys, extended until a row of their scores fills its last cache line."""
    grain = LINE // dtype.itemsize
    return slice(keys.start, keys.start + _up(keys.stop - keys.start, grain))


def exp_(x: torch.Tensor) -> torch.Tensor:
    """exp in place of what is at most 0 but for rounding; exactly 0 below the smallest normal
    number, where hardware would be slow."""
    floor = _FLOORS[x.dtype]
    return torch.threshold_(x.clamp_(floor, 0.0).exp_(), math.exp(floor) * 1.001, 0.0)


def _cap(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """+inf where visible, else -inf: a minimum with it hides, as fast as an addition."""
    return visible.to(dtype).sub_(0.5).mul_(math.inf)


def _down(n: int, grain: int) -> int:
    return n // grain * grain


def _up(n: int, grain: int) -> int:
    return -(-n // grain) * grain

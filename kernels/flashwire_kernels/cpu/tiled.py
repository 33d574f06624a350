"""Attention with every option, tile by tile: online softmax forward, recomputation backward.

After Dao, "FlashAttention-2" (2023). Forward keeps, per row, the running maximum m of the scores,
the sum l of exp(s - m) and the matching sum of exp(s - m) v; a tile that raises m fades what came
before by exp(m_old - m_new). Backward computes p = exp(s - lse) again from the saved lse.

Tile sizes depend on the shape of one sequence, never on how many there are, so that a
sequence's bits do not depend on its company. Nothing here adds up in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from flashwire_kernels.cpu.part import LINE, Part, aligned
from flashwire_kernels.cpu.tiles import (
    Lanes,
    Tiles,
    exp_,
    lanes,
    scaled,
    segments,
    whole_lines,
)
from flashwire_kernels.geometry import Band

_SHORT, _LONG = 64, 512  # a tile is short in what the outer loop walks, long in what the inner does
_FEW, _FEW_LONG = 8, 4096  # of at most so many rows, a tile is this long
_ROWS_WITH_GROUP = 256  # rows of a forward tile when several query heads share their keys


def forward(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a part."""
    batch, heads, len_q, _ = part.q.shape
    k, v = _padded(part)
    rows_at_once = min(len_q, max(1, min(_SHORT, _ROWS_WITH_GROUP // part.group)))
    long = _keys_at_once(part.group * rows_at_once)
    all_lanes = lanes(part, per_lane := part.group * rows_at_once * min(long, k.shape[2]))
    tiles = Tiles(part, scaled(part), k, _most(all_lanes) * per_lane)
    out = part.q.new_empty((batch, heads, len_q, v.shape[3]))
    lse = part.q.new_empty((batch, heads, len_q, 1))
    for lane in all_lanes:
        for first in range(0, len_q, rows_at_once):
            rows = slice(first, min(first + rows_at_once, len_q))
            rows_out, rows_lse = _forward_rows(part, tiles, lane, v, rows, long)
            lane.put_queries(out, rows, rows_out)
            lane.put_queries(lse, rows, rows_lse)
    return out, lse[..., 0]


def _forward_rows(
    part: Part, tiles: Tiles, lane: Lanes, v: torch.Tensor, rows: slice, long: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of some rows, (count, group * rows, Dv) and (count, group * rows, 1), by tiles of
    so many keys.
    """
    len_k, grain = part.k.shape[2], LINE // v.dtype.itemsize
    height = part.group * (rows.stop - rows.start)
    m = v.new_full((lane.count, height, 1), -math.inf)
    base, total = torch.zeros_like(m), torch.zeros_like(m, dtype=torch.float64)
    acc = v.new_zeros((lane.count, height, v.shape[3]))
    seen_by_any = part.band.any_range(rows.start, rows.stop, len_k)
    seen_by_all = part.band.all_range(rows.start, rows.stop, len_k)
    for first, last, whole in segments(seen_by_any, seen_by_all, len_k, long, grain):
        keys = slice(first, last)
        s = tiles.scores(lane, rows, keys, whole)
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        base = top.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)
        p = exp_(s.sub_(base))
        fade = exp_(m - base)
        total = total * fade + p.sum(-1, keepdim=True)
        if part.dropout is not None:
            p.mul_(tiles.kept(lane, rows, keys, p.shape[2]))
        acc.mul_(fade).add_(torch.bmm(p, lane.keys(v, whole_lines(keys, v.dtype))))
        m = top
    kept = 1.0 if part.dropout is None else 1.0 - part.dropout.p
    out = acc.div_(total.masked_fill(total == 0, 1).mul_(kept).to(acc.dtype))
    return out, base + total.log().to(base.dtype)


def _keys_at_once(rows: int) -> int:
    """Of a forward tile: with few rows, many keys, or there would be more calls than work."""
    return _LONG if rows > _FEW else _FEW_LONG


def backward(
    part: Part,
    lse: torch.Tensor,
    dout: torch.Tensor,
    delta: torch.Tensor,
    dbias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a part; adds to dbias, which has the shape of part.bias.

    dout is `aligned`. delta is sum(dout * out) - dlse per row, (B, Hq, Lq) like lse.
    """
    len_q, len_k = part.q.shape[2], part.k.shape[2]
    rows_at_once = min(len_q, max(1, _LONG // part.group))
    walk = _Backward(part, lse, dout, delta, dbias, rows_at_once)
    by_key = Band(-part.band.offset, part.band.right, part.band.left)
    for lane in walk.lanes:
        for first in range(0, len_k, _SHORT):
            keys = slice(first, min(first + _SHORT, len_k))
            seen_by_any = by_key.any_range(keys.start, keys.stop, len_q)
            seen_by_all = by_key.all_range(keys.start, keys.stop, len_q)
            walk.keys(lane, keys, segments(seen_by_any, seen_by_all, len_q, rows_at_once, 1))
    return walk.dq, walk.dk[:, :, :len_k], walk.dv[:, :, :len_k]


class _Backward:
    """The gradients of one part, gathered tile by tile."""

    def __init__(
        self,
        part: Part,
        lse: torch.Tensor,
        dout: torch.Tensor,
        delta: torch.Tensor,
        dbias: torch.Tensor | None,
        rows_at_once: int,
    ) -> None:
        self._part, self._dout, self._dbias = part, dout, dbias
        self._q, (self._k, self._v) = scaled(part), _padded(part)
        finite = lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)
        self._lse, self._delta = finite[..., None].contiguous(), delta[..., None].contiguous()
        per_lane = part.group * rows_at_once * min(_SHORT, self._k.shape[2])
        self.lanes = lanes(part, per_lane)
        largest = _most(self.lanes) * per_lane
        self._tiles = Tiles(part, self._q, self._k, largest)
        self._scratch = [self._k.new_empty(largest) for _ in range(2 if part.softcap else 1)]
        self.dq = torch.zeros_like(part.q)
        self.dk, self.dv = torch.empty_like(self._k), torch.empty_like(self._v)

    def keys(self, lane: Lanes, keys: slice, rows: Iterator[tuple[int, int, bool]]) -> None:
        """All that the pairs of some keys give: their dk and dv, their share of dq and dbias."""
        wide = whole_lines(keys, self._k.dtype)
        dk, dv = (
            t.new_zeros((lane.count, wide.stop - wide.start, t.shape[3]))
            for t in (self._k, self._v)
        )
        for first, last, whole in rows:
            self._tile(lane, slice(first, last), keys, whole, dk, dv)
        lane.put_keys(self.dk, wide, dk)
        lane.put_keys(self.dv, wide, dv)

    def _tile(
        self,
        lane: Lanes,
        rows: slice,
        keys: slice,
        whole: bool,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        part, wide = self._part, slice(keys.start, keys.start + dk.shape[1])
        shape = (lane.count, part.group * (rows.stop - rows.start), dk.shape[1])
        ds, *rest = (t[: math.prod(shape)].view(shape) for t in self._scratch)
        steepness = rest[0] if rest else None
        dout = lane.queries(self._dout, rows)
        p = self._tiles.scores(lane, rows, keys, whole, steepness)
        p = exp_(p.sub_(lane.queries(self._lse, rows)))
        torch.bmm(dout, lane.keys(self._v, wide).mT, out=ds)
        if part.dropout is None:
            ds.sub_(lane.queries(self._delta, rows)).mul_(p)
            dv.add_(torch.bmm(p.mT, dout))
        else:
            kept, grow = self._tiles.kept(lane, rows, keys, shape[2]), 1 / (1 - part.dropout.p)
            ds.mul_(kept).mul_(grow).sub_(lane.queries(self._delta, rows)).mul_(p)
            dv.add_(torch.bmm(p.mul_(kept).mT, dout), alpha=grow)
        if self._dbias is not None:
            into = lane.pairs(self._dbias, rows, keys)
            into += lane.results(ds, rows)[..., : keys.stop - keys.start].sum_to_size(into.shape)
        if steepness is not None:
            ds.mul_(steepness)
        # The queries are scaled already, but for the division by softcap.
        dk.add_(torch.bmm(ds.mT, lane.queries(self._q, rows)), alpha=part.softcap or 1.0)
        dq = torch.bmm(ds, lane.keys(self._k, wide)).mul_(part.scale)
        self.dq[lane.batch, lane.heads_q, rows] += lane.results(dq, rows)


def _padded(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with zero keys up to whole cache lines of scores."""
    length = whole_lines(slice(0, part.k.shape[2]), part.k.dtype).stop
    k, v = (aligned(t, t.dtype, length) for t in (part.k, part.v))
    return k, v


def _most(all_lanes: list[Lanes]) -> int:
    return max(lane.count for lane in all_lanes)

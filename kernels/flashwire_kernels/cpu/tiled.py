"""Attention with every option, tile by tile: online softmax forward, recomputation backward.

After Dao, "FlashAttention-2" (2023). Forward keeps, per row, the running maximum m of the scores,
the sum l of exp(s - m) and the matching sum of exp(s - m) v; a tile that raises m fades what came
before by exp(m_old - m_new). Backward computes p = exp(s - lse) again from the saved lse.

Tile sizes depend on the shape of one sequence, never on how many there are, so that a
sequence's bits do not depend on its company. Nothing here adds up in parallel.
"""

from __future__ import annotations

import math

import torch

from flashwire_kernels.cpu.part import LINE, Part, aligned
from flashwire_kernels.cpu.tiles import Lanes, Tiles, exp_, lanes, segments
from flashwire_kernels.geometry import Band

_SHORT, _LONG = 64, 512  # a tile is short in what the outer loop walks, long in what the inner does
_ROWS_WITH_GROUP = 256  # rows of a forward tile when several query heads share their keys


def forward(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a part."""
    batch, heads, len_q, _ = part.q.shape
    grain = LINE // part.q.dtype.itemsize
    k, v = _padded(part)
    rows_at_once = min(len_q, max(1, min(_SHORT, _ROWS_WITH_GROUP // part.group)))
    per_lane = part.group * rows_at_once * min(_LONG, k.shape[2])
    out = part.q.new_empty((batch, heads, len_q, v.shape[3]))
    lse = part.q.new_empty((batch, heads, len_q))
    all_lanes = list(lanes(part, per_lane))
    tiles = Tiles(part, k, _most(all_lanes) * per_lane)
    for lane in all_lanes:
        for first in range(0, len_q, rows_at_once):
            rows = slice(first, min(first + rows_at_once, len_q))
            block, block_lse = _forward_rows(part, tiles, lane, v, rows, grain)
            out[lane.batch, lane.heads_q, rows] = tiles.by_pair(lane, block, rows)
            lse[lane.batch, lane.heads_q, rows] = tiles.by_pair(lane, block_lse, rows)[..., 0]
    return out, lse


def _forward_rows(
    part: Part, tiles: Tiles, lane: Lanes, v: torch.Tensor, rows: slice, grain: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of some rows, (lanes, group * rows, Dv) and (lanes, group * rows, 1)."""
    q, len_k = lane.queries(part.q, rows), part.k.shape[2]
    seen_by_any = part.band.any_range(rows.start, rows.stop, len_k)
    seen_by_all = part.band.all_range(rows.start, rows.stop, len_k)
    m = q.new_full((*q.shape[:2], 1), -math.inf)
    base, total = torch.zeros_like(m), torch.zeros_like(m, dtype=torch.float64)
    acc = q.new_zeros((*q.shape[:2], v.shape[3]))
    for first, last, whole in segments(seen_by_any, seen_by_all, len_k, _LONG, grain):
        keys = slice(first, last)
        s = tiles.scores(lane, q, rows, keys, whole)
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        base = top.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)
        p = exp_(s.sub_(base))
        fade = exp_(m - base)
        total = total * fade + p.sum(-1, keepdim=True)
        if part.dropout is not None:
            p.mul_(tiles.kept(lane, rows, keys, p.shape[2]))
        acc = acc.mul_(fade).baddbmm_(p, lane.keys(v, slice(first, first + p.shape[2])))
        m = top
    kept = 1.0 if part.dropout is None else 1.0 - part.dropout.p
    out = acc.div_(total.masked_fill(total == 0, 1).mul_(kept).to(acc.dtype))
    return out, base + total.log().to(base.dtype)


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
    k, v = _padded(part)
    len_q, len_k = part.q.shape[2], part.k.shape[2]
    rows_at_once = min(len_q, max(1, _LONG // part.group))
    per_lane = part.group * rows_at_once * min(_SHORT, k.shape[2])
    dq, dk, dv = torch.zeros_like(part.q), torch.empty_like(k), torch.empty_like(v)
    lse = lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)[..., None].contiguous()
    delta = delta[..., None].contiguous()
    all_lanes = list(lanes(part, per_lane))
    step = _BackwardTiles(part, k, v, lse, dout, delta, dq, dbias, _most(all_lanes) * per_lane)
    by_key = Band(-part.band.offset, part.band.right, part.band.left)
    for lane in all_lanes:
        for first in range(0, len_k, _SHORT):
            keys = slice(first, min(first + _SHORT, len_k))
            wide = slice(first, first + Tiles.width(keys, k.dtype))
            dk_block, dv_block = (
                torch.zeros_like(lane.keys(t, wide), memory_format=torch.contiguous_format)
                for t in (k, v)
            )
            by_any = by_key.any_range(keys.start, keys.stop, len_q)
            by_all = by_key.all_range(keys.start, keys.stop, len_q)
            for row, last, whole in segments(by_any, by_all, len_q, rows_at_once, 1):
                step.add(lane, slice(row, last), keys, whole, dk_block, dv_block)
            lane.keys(dk, wide).copy_(dk_block)
            lane.keys(dv, wide).copy_(dv_block)
    return dq, dk[:, :, :len_k], dv[:, :, :len_k]


class _BackwardTiles:
    """Adds what one tile gives to each gradient."""

    def __init__(
        self,
        part: Part,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        delta: torch.Tensor,
        dq: torch.Tensor,
        dbias: torch.Tensor | None,
        largest: int,
    ) -> None:
        self._part, self._k, self._v = part, k, v
        self._lse, self._dout, self._delta = lse, dout, delta
        self._dq, self._dbias = dq, dbias
        self._tiles = Tiles(part, k, largest)
        self._scratch = [k.new_empty(largest) for _ in range(1 if part.softcap is None else 2)]

    def add(
        self,
        lane: Lanes,
        rows: slice,
        keys: slice,
        whole: bool,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """dk and dv are (lanes, width, D) and (lanes, width, Dv) of the tile's keys."""
        part, tiles = self._part, self._tiles
        wide = slice(keys.start, keys.start + dk.shape[1])
        q, dout = lane.queries(part.q, rows), lane.queries(self._dout, rows)
        shape = (q.shape[0], q.shape[1], dk.shape[1])
        ds, *capped = (t[: math.prod(shape)].view(shape) for t in self._scratch)
        steepness = capped[0] if capped else None
        s = tiles.scores(lane, q, rows, keys, whole, steepness)
        p = exp_(s.sub_(lane.queries(self._lse, rows)))
        ds.baddbmm_(dout, lane.keys(self._v, wide).mT, beta=0)
        scale_kept = 1.0
        keep = None
        if part.dropout is not None:
            scale_kept = 1.0 / (1.0 - part.dropout.p)
            keep = tiles.kept(lane, rows, keys, p.shape[2])
            ds.mul_(keep).mul_(scale_kept)
        ds.sub_(lane.queries(self._delta, rows)).mul_(p)
        if keep is not None:
            p.mul_(keep)
        dv.baddbmm_(p.mT, dout, alpha=scale_kept)
        if self._dbias is not None:
            into = lane.pairs(self._dbias, rows, keys)
            by_pair = tiles.by_pair(lane, ds, rows)[..., : keys.stop - keys.start]
            into += by_pair.sum_to_size(into.shape)
        if steepness is not None:
            ds.mul_(steepness)
        dk.baddbmm_(ds.mT, q, alpha=part.scale)
        dq = torch.bmm(ds, lane.keys(self._k, wide)).mul_(part.scale)
        self._dq[lane.batch, lane.heads_q, rows] += tiles.by_pair(lane, dq, rows)


def _padded(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with zero keys up to whole cache lines of scores."""
    grain = LINE // part.k.dtype.itemsize
    length = -(-part.k.shape[2] // grain) * grain
    k, v = (aligned(t, t.dtype, length) for t in (part.k, part.v))
    return k, v


def _most(all_lanes: list[Lanes]) -> int:
    return max(len(range(lane.flat.start, lane.flat.stop)) for lane in all_lanes)

"""The cpu backend: a problem's batches, each by PyTorch's operator or tile by tile."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from flashwire_kernels.cpu import aten, sinks, tiled
from flashwire_kernels.cpu.batches import Batch, batches
from flashwire_kernels.cpu.hidden import nan_for_inf, scrub, tame
from flashwire_kernels.cpu.part import Cut, aligned, make_part, wide_dtype
from flashwire_kernels.geometry import Band
from flashwire_kernels.support import score_factors
from flashwire_kernels.tensors import Gradients, Inputs, Wanted
from flashwire_kernels.validation import Problem

_SMALL, _LARGE = 1e-20, 1e20
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(problem: Problem, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See tensors.Backend."""
    if _beyond_float32(problem):
        out, lse = forward(*_in_float64(problem, x))
        return out.to(x.q.dtype), lse.float()
    if not problem.packed:
        out, lse = _forward_batch(problem, x, next(batches(problem, x)))
        return (out if out.dtype == x.q.dtype else out.to(x.q.dtype)), lse
    out = x.q.new_zeros((*x.q.shape[:-1], problem.dim_v))
    lse = x.q.new_full(x.q.shape[:-1], -math.inf, dtype=wide_dtype(x.q.dtype))
    for batch in batches(problem, x):
        batch_out, batch_lse = _forward_batch(problem, x, batch)
        batch.put_queries(out, batch_out)
        batch.put_queries(lse, batch_lse)
    return out, lse


def backward(
    problem: Problem,
    x: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """See tensors.Backend."""
    if _beyond_float32(problem):
        dlse = None if dlse is None else dlse.double()
        wide = backward(*_in_float64(problem, x), out, lse.double(), dout, dlse, wanted)
        dq, dk, dv = (t.to(x.q.dtype) for t in (wide.dq, wide.dk, wide.dv))
        return dataclasses.replace(wide, dq=dq, dk=dk, dv=dv)
    sums = _Sums.of(problem, x, wanted)
    saved = _Saved(out, lse, dout, dlse)
    if not problem.packed:
        batch = next(batches(problem, x))
        dq, dk, dv = _backward_batch(problem, x, batch, saved.of_batch(batch), sums)
        return sums.with_inputs(x, dq.to(x.q.dtype), dk.to(x.q.dtype), dv.to(x.q.dtype))
    dq, dk, dv = (
        torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v)
    )
    for batch in batches(problem, x):
        batch_dq, batch_dk, batch_dv = _backward_batch(
            problem, x, batch, saved.of_batch(batch), sums
        )
        batch.put_queries(dq, batch_dq)
        batch.put_keys(dk, batch_dk)
        batch.put_keys(dv, batch_dv)
    return sums.with_inputs(x, dq, dk, dv)


def _beyond_float32(problem: Problem) -> bool:
    """Whether factors of the scores leave float32's range, or come so near that scores might."""
    return problem.dtype != "float64" and not all(
        _SMALL <= abs(factor) <= _LARGE for factor in score_factors(problem) if factor
    )


def _in_float64(problem: Problem, x: Inputs) -> tuple[Problem, Inputs]:
    q, k, v = (t.double() for t in (x.q, x.k, x.v))
    return dataclasses.replace(problem, dtype="float64"), dataclasses.replace(x, q=q, k=k, v=v)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What backward is given per query, (B, Hq, Lq, ...) or packed."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def of_batch(self, batch: Batch) -> _Saved:
        out, lse, dout = (batch.queries(t) for t in (self.out, self.lse, self.dout))
        dlse = None if self.dlse is None else batch.queries(self.dlse).contiguous()
        return _Saved(out, lse.contiguous(), dout, dlse)  # sums follow the order of memory


@dataclass(frozen=True, slots=True)
class _Sums:
    """Gradients that all batches add to, wide."""

    dbias: torch.Tensor | None
    dsinks: torch.Tensor | None

    @classmethod
    def of(cls, problem: Problem, x: Inputs, wanted: Wanted) -> _Sums:
        dbias = dsinks = None
        if wanted.bias and x.bias is not None:
            pairs = problem.batch * problem.heads_q * problem.len_q * problem.len_k
            # Where every entry is its own nothing is summed; sums of many are taken in float64.
            wide = wide_dtype(x.q.dtype) if x.bias.numel() == pairs else torch.float64
            dbias = x.bias.new_zeros(x.bias.shape, dtype=wide)
        if wanted.sinks and x.sinks is not None:
            dsinks = x.sinks.new_zeros(x.sinks.shape, dtype=torch.float64)
        return cls(dbias, dsinks)

    def with_inputs(
        self, x: Inputs, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> Gradients:
        dbias = None if self.dbias is None or x.bias is None else self.dbias.to(x.bias.dtype)
        dsinks = None if self.dsinks is None or x.sinks is None else self.dsinks.to(x.sinks.dtype)
        return Gradients(dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks)


def _cut(problem: Problem, batch: Batch) -> Cut | None:
    """The pairs that position leaves visible; None when there are none."""
    if not batch.index or not problem.heads_q:
        return None
    band = Band.of(problem.spec, batch.len_q, batch.len_k)
    return Cut.of(band, batch.len_q, batch.len_k)


def _forward_batch(problem: Problem, x: Inputs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of all rows of a batch, wide."""
    cut, wide = _cut(problem, batch), wide_dtype(x.q.dtype)
    if cut is None:
        shape = (len(batch.index), problem.heads_q, batch.len_q)
        out = x.q.new_zeros((*shape, problem.dim_v), dtype=wide)
        lse = x.q.new_full(shape, -math.inf, dtype=wide)
    else:
        part = make_part(problem, x, batch, cut)
        if not tame(part, part.v):
            part = scrub(part)
        out, lse = aten.forward(part) if aten.serves(part) else tiled.forward(part)
        if out.shape[3] != problem.dim_v:
            out = out[..., : problem.dim_v]
        out = _whole(out, batch.len_q, cut.rows, 0.0)
        lse = _whole(lse, batch.len_q, cut.rows, -math.inf)
    return (out, lse) if x.sinks is None else sinks.fold(out, lse, x.sinks)


def _backward_batch(
    problem: Problem, x: Inputs, batch: Batch, saved: _Saved, sums: _Sums
) -> Triple:
    """(dq, dk, dv) of all rows and keys of a batch, wide; adds to sums."""
    cut, wide = _cut(problem, batch), wide_dtype(x.q.dtype)
    if cut is None:
        _add_sinks(x, saved, torch.zeros_like(saved.lse), sums)
        q, k, v = batch.queries(x.q), batch.keys(x.k), batch.keys(x.v)
        dq, dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (q, k, v))
        return dq, dk, dv
    part = make_part(problem, x, batch, cut)
    out = aligned(saved.out[:, :, cut.rows], wide)
    dout = aligned(saved.dout[:, :, cut.rows], wide)
    dlse = () if saved.dlse is None else (saved.dlse[:, :, cut.rows],)
    if not tame(part, part.v, dout, *dlse):
        part, dout = scrub(part), nan_for_inf(dout)
        if part.seen_rows is not None:
            dout = dout.where(part.seen_rows, 0)
    dbias = None if sums.dbias is None else cut.pairs(batch.pairs(sums.dbias))
    lse = saved.lse[:, :, cut.rows]
    by_aten = dbias is None and saved.dlse is None and aten.serves(part)
    if sums.dsinks is not None or not by_aten:
        delta = (dout * out).sum(-1)
        delta = _add_sinks(x, saved, _whole(delta, batch.len_q, cut.rows, 0.0), sums)
    if by_aten:
        dq, dk, dv = aten.backward(part, out, lse, dout)
    else:
        delta = delta[:, :, cut.rows]
        if part.seen_rows is not None:
            delta = delta.where(part.seen_rows[..., 0], 0)
        dq, dk, dv = tiled.backward(part, lse, dout, delta, dbias)
    if dk.shape[1] != problem.heads_kv:  # scrub took the heads of a group apart
        dk, dv = (t.view(t.shape[0], problem.heads_kv, -1, *t.shape[2:]).sum(2) for t in (dk, dv))
    return (
        _whole(dq[..., : problem.dim], batch.len_q, cut.rows, 0.0),
        _whole(dk[..., : problem.dim], batch.len_k, cut.keys, 0.0),
        _whole(dv[..., : problem.dim_v], batch.len_k, cut.keys, 0.0),
    )


def _add_sinks(x: Inputs, saved: _Saved, delta: torch.Tensor, sums: _Sums) -> torch.Tensor:
    """delta - dlse, and 0 where lse is -inf, since such an lse depends on nothing.

    Adds what these rows give to dsinks.
    """
    if saved.dlse is not None:
        delta = delta - saved.dlse
    delta = delta.masked_fill(saved.lse == -math.inf, 0)
    if sums.dsinks is not None and x.sinks is not None:
        sums.dsinks.add_(sinks.gradient(x.sinks, saved.lse, delta))
    return delta


def _whole(t: torch.Tensor, length: int, rows: slice, fill: float) -> torch.Tensor:
    """t, which lies at `rows` of dimension 2, among rows of `fill` up to length."""
    if t.shape[2] == length:
        return t
    whole = t.new_full((*t.shape[:2], length, *t.shape[3:]), fill)
    whole[:, :, rows] = t
    return whole

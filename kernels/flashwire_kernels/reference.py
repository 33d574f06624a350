"""The specification: attention as the contract writes it, in float64, with nothing clever.

Materialises the scores. Forward and backward are explicit formulas; autograd is not involved.
What a backend may round, reorder or never compute is here computed and exact:

    s     = scale * q k^T;  softcap * tanh(s / softcap);  - slope * |pos(i) - j|;  + bias
    lse   = log(sum over visible j of exp(s) + exp(sink))
    p     = exp(s - lse) where visible, else 0
    P     = p * keep / (1 - dropout)
    out   = P v

    delta = sum over d of dout * out
    dP    = dout v^T                        dp = dP * keep / (1 - dropout)
    ds    = p * (dp - delta + dlse)         the gradient on lse enters here and nowhere else
    dv    = P^T dout
    dq    = scale * ds' k                   ds' = ds * (1 - tanh(s / softcap)^2)
    dk    = scale * ds'^T q
    dbias = ds, summed to bias' shape
    dsink = sum over rows of exp(sink - lse) * (dlse - delta)

p comes from the lse that backward is given and delta from the out that it is given, so a partial
attention's gradients are right when both belong to the union it is part of.

A sum over visible pairs is meant literally (`_sum_visible`): a NaN reaches only what sees it.
Infinities are turned into NaN on the way in, so that no tanh or exp makes them finite again; only
those that hide a key or switch a sink off stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashwire_kernels.geometry import Band, position_offset
from flashwire_kernels.philox import keep_tile
from flashwire_kernels.tensors import Gradients, Inputs, Wanted
from flashwire_kernels.validation import Problem

_NAN, _INF = float("nan"), float("inf")
_SCORES_AT_ONCE = 1 << 22


def forward(problem: Problem, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out in q's dtype and lse in `problem.lse_dtype`, each rounded once from float64."""
    out, lse = forward64(problem, x)
    return out.to(x.q.dtype), lse.to(getattr(torch, problem.lse_dtype))


def backward(
    problem: Problem,
    x: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Gradients in the dtypes of what they belong to, each rounded once from float64."""
    wide = backward64(problem, x, out, lse, dout, dlse, wanted)
    return Gradients(
        dq=wide.dq.to(x.q.dtype),
        dk=wide.dk.to(x.k.dtype),
        dv=wide.dv.to(x.v.dtype),
        dbias=_like(wide.dbias, x.bias),
        dsinks=_like(wide.dsinks, x.sinks),
    )


def forward64(problem: Problem, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` before rounding: float64 out and lse."""
    out = _zeros(x.q.shape[:-1] + x.v.shape[-1:], x.q)
    lse = _zeros(x.q.shape[:-1], x.q).fill_(-_INF)
    for part in parts(problem):
        scores = pair_scores(problem, part, x)
        sinks = sink_logits(problem, x)
        hidden = scores.s.masked_fill(~scores.visible, -_INF)
        part_lse = torch.cat([hidden, sinks.expand(*hidden.shape[:-1], -1)], -1).logsumexp(-1)
        p = probabilities(scores, part_lse)
        v = per_query_head(problem, exact(part.of_k(x.v)))
        part.of_q(out).copy_(_sum_visible(p * dropout_factor(problem, part, x), v, scores.visible))
        part.of_q(lse).copy_(part_lse)
    return out, lse


def backward64(
    problem: Problem,
    x: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """`backward` before rounding: float64 gradients."""
    dq, dk, dv = _zeros(x.q.shape, x.q), _zeros(x.k.shape, x.k), _zeros(x.v.shape, x.v)
    dbias = _zeros(x.bias.shape, x.bias) if wanted.bias and x.bias is not None else None
    dsinks = _zeros(x.sinks.shape, x.sinks) if wanted.sinks and x.sinks is not None else None
    for part in parts(problem):
        q, do = exact(part.of_q(x.q)), exact(part.of_q(dout))
        k, v = (per_query_head(problem, exact(part.of_k(t))) for t in (x.k, x.v))
        part_lse = part.of_q(lse).double()
        scores = pair_scores(problem, part, x)
        visible, dropout = scores.visible, dropout_factor(problem, part, x)
        p = probabilities(scores, part_lse)

        # delta - dlse per row. A row that sees nothing has out 0, whatever its dout holds.
        row = (do * exact(part.of_q(out))).sum(-1).masked_fill(~visible.any(-1), 0)
        if dlse is not None:
            row = row - part.of_q(dlse)

        ds = (p * ((do @ v.mT) * dropout - row[..., None])).masked_fill(~visible, 0)
        draw = (ds * scores.steepness * problem.scale).masked_fill(~visible, 0)
        part.of_q(dq).copy_(_sum_visible(draw, k, visible))
        part.of_k(dk).copy_(per_key_head(problem, _sum_visible(draw.mT, q, visible.mT)))
        part.of_k(dv).copy_(per_key_head(problem, _sum_visible((p * dropout).mT, do, visible.mT)))
        if dbias is not None:
            target = part.of_pairs(dbias)
            target += ds.sum_to_size(target.shape)
        if dsinks is not None:
            p_sink = (sink_logits(problem, x)[..., 0] - part_lse).exp()
            depends = part_lse != -_INF  # such an lse depends on nothing: no sink, no key
            dsinks -= (p_sink * row).masked_fill(~depends, 0).sum((0, 2))
    return Gradients(dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks)


@dataclass(frozen=True, slots=True)
class Part:
    """Some batch rows of a dense problem, or one sequence of a packed one, seen as (B, H, L, D)."""

    packed: bool
    batch: range
    rows: slice
    keys: slice

    @property
    def len_q(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def len_k(self) -> int:
        return int(self.keys.stop - self.keys.start)

    def of_q(self, t: torch.Tensor) -> torch.Tensor:
        """The view (B, H, Lq, ...) of a tensor with a row per query."""
        return self._view(t, self.rows)

    def of_k(self, t: torch.Tensor) -> torch.Tensor:
        """The view (B, H, Lk, ...) of a tensor with a row per key."""
        return self._view(t, self.keys)

    def of_pairs(self, t: torch.Tensor) -> torch.Tensor:
        """The view of a mask or bias, of rank 4 and broadcastable to (B, Hq, Lq, Lk)."""
        t = t.reshape((1,) * (4 - t.dim()) + t.shape)
        if t.shape[0] != 1:
            t = t[self.batch.start : self.batch.stop]
        if self.packed and t.shape[2] != 1:
            t = t[:, :, : self.len_q]
        if self.packed and t.shape[3] != 1:
            t = t[..., : self.len_k]
        return t

    def _view(self, t: torch.Tensor, tokens: slice) -> torch.Tensor:
        if self.packed:
            return t[tokens].transpose(0, 1)[None]
        return t[self.batch.start : self.batch.stop]


def parts(problem: Problem) -> Iterator[Part]:
    """The problem in pieces that do not touch each other; together, every row and visible pair."""
    if not problem.heads_q or not problem.len_q:
        return
    if not problem.packed:
        step = max(1, _SCORES_AT_ONCE // (problem.heads_q * problem.len_q * max(1, problem.len_k)))
        for b in range(0, problem.batch, step):
            batch = range(b, min(b + step, problem.batch))
            yield Part(False, batch, slice(0, problem.len_q), slice(0, problem.len_k))
        return
    first_q = first_k = 0
    for b, (len_q, len_k) in enumerate(problem.sequences):
        rows, keys = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        if len_q:
            yield Part(True, range(b, b + 1), rows, keys)
        first_q, first_k = rows.stop, keys.stop


@dataclass(frozen=True, slots=True)
class Scores:
    """What is known of each pair, (B, Hq, Lq, Lk).

    s          the score that softmax sees; whatever it comes to where hidden, NaN included
    steepness  d s / d (scale * <q, k>)
    """

    s: torch.Tensor
    steepness: torch.Tensor
    visible: torch.Tensor


def pair_scores(problem: Problem, part: Part, x: Inputs) -> Scores:
    """The scores of one part."""
    q, k = exact(part.of_q(x.q)), per_query_head(problem, exact(part.of_k(x.k)))
    s = problem.scale * (q @ k.mT)
    steepness = torch.ones_like(s)
    if problem.spec.softcap is not None:
        tanh = torch.tanh(s / problem.spec.softcap)
        s, steepness = problem.spec.softcap * tanh, 1 - tanh**2
    if x.alibi_slopes is not None:
        s = s - slope_factors(part, x.alibi_slopes) * distance(problem, part, x).abs()
    if x.bias is not None:
        s = s + part.of_pairs(x.bias)
    return Scores(s, steepness, visible_pairs(problem, part, x).expand(s.shape))


def visible_pairs(problem: Problem, part: Part, x: Inputs) -> torch.Tensor:
    """Boolean, broadcastable to (B, Hq, Lq, Lk): by position, by mask, by a bias of -inf."""
    band, ahead = Band.of(problem.spec, part.len_q, part.len_k), distance(problem, part, x)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if band.left is not None:
        visible &= ahead >= -band.left
    if band.right is not None:
        visible &= ahead <= band.right
    if x.mask is not None:
        visible = visible & part.of_pairs(x.mask)
    if x.bias is not None:
        visible = visible & (part.of_pairs(x.bias) != -_INF)
    return visible


def distance(problem: Problem, part: Part, x: Inputs) -> torch.Tensor:
    """j - pos(i), (Lq, Lk)."""
    i = torch.arange(part.len_q, device=x.q.device)
    j = torch.arange(part.len_k, device=x.q.device)
    return j - (i[:, None] + position_offset(problem.spec, part.len_q, part.len_k))


def slope_factors(part: Part, slopes: torch.Tensor) -> torch.Tensor:
    """ALiBi's slopes, (Hq,) or (B, Hq), as (1 or B, Hq, 1, 1)."""
    if slopes.dim() == 2:
        slopes = slopes[part.batch.start : part.batch.stop]
    return exact(slopes)[..., None, None]


def sink_logits(problem: Problem, x: Inputs) -> torch.Tensor:
    """(Hq, 1, 1) logits, or (Hq, 1, 0) of none."""
    if x.sinks is None:
        return _zeros((problem.heads_q, 1, 0), x.q)
    sinks = x.sinks.double()
    return sinks.masked_fill(sinks == _INF, _NAN)[:, None, None]


def probabilities(scores: Scores, lse: torch.Tensor) -> torch.Tensor:
    """exp(s - lse) where visible, exactly 0 elsewhere."""
    # At most 1, also where rounding to float32 has moved a huge lse below its score.
    return (scores.s - lse[..., None]).clamp(max=0).exp().masked_fill(~scores.visible, 0)


def dropout_factor(problem: Problem, part: Part, x: Inputs) -> torch.Tensor:
    """What dropout multiplies p by, 0 or 1 / (1 - dropout_p); broadcastable to (B, Hq, Lq, Lk)."""
    spec = problem.spec
    if not spec.dropout_p or spec.dropout_seed is None:
        return torch.ones((1, 1, 1, 1), dtype=torch.float64, device=x.q.device)
    keep = keep_tile(
        spec.dropout_seed,
        spec.dropout_p,
        batch=part.batch,
        heads=range(problem.heads_q),
        rows=range(part.len_q),
        cols=range(part.len_k),
        device=x.q.device,
    )
    return keep.double() / (1 - spec.dropout_p)


def _sum_visible(weights: torch.Tensor, rows: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """sum over visible j of weights[..., i, j] * rows[..., j, :]; weights are 0 where hidden."""
    finite = rows.isfinite()
    total = weights @ rows.masked_fill(~finite, 0)
    if finite.all():
        return total
    return total.masked_fill(visible.double() @ (~finite).double() > 0, _NAN)


def per_query_head(problem: Problem, t: torch.Tensor) -> torch.Tensor:
    """(B, Hkv, Lk, D) -> (B, Hq, Lk, D): query head h reads key head h // group."""
    return t.repeat_interleave(problem.group, dim=1)


def per_key_head(problem: Problem, t: torch.Tensor) -> torch.Tensor:
    """(B, Hq, Lk, D) -> (B, Hkv, Lk, D): gradients of a shared head add up."""
    return t.reshape(t.shape[0], problem.heads_kv, problem.group, *t.shape[2:]).sum(2)


def exact(t: torch.Tensor) -> torch.Tensor:
    """A contiguous float64 copy: equal values give equal bits, wherever and however they lay."""
    t = t.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return t.masked_fill_(t.isinf(), _NAN)


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=like.device)


def _like(t: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None or given is None else t.to(given.dtype)

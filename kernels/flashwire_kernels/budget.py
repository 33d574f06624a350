"""How far a backend may be from the float64 reference: the contract's error budget, as code.

Per tensor, max error <= 2 * e + (u + t * (1 + S)) * A, and for lse <= t_lse * (1 + S):

    e      the error of plain materialised attention in the request's own dtype (plain.py)
    u, t   units of the dtype: the coarser of q's and the tensor's own (dbias and dsinks have one)
    S      the largest |s| over visible scores
    A      the largest value of the tensor's own formula on absolute values

Where the contract leaves room, this is what rounding to nearest can promise and no more. S counts
|scale| sum |q| |k| as well, the terms by which a dot product errs however small their sum is, the
sinks, which are scores too, and lse, which no float holds more exactly than its own size allows. A
takes sum |dout| |out| for delta, since a backend computes delta from an out already rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashwire_kernels import plain
from flashwire_kernels.reference import (
    backward64,
    dropout_factor,
    exact,
    forward64,
    pair_scores,
    parts,
    per_key_head,
    per_query_head,
    probabilities,
    sink_logits,
)
from flashwire_kernels.tensors import Inputs, Wanted
from flashwire_kernels.validation import Problem

_U = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0, "float64": 0.0}
_T = {"bfloat16": 2.0**-23, "float16": 2.0**-23, "float32": 2.0**-23, "float64": 2.0**-52}
_T_LSE = {"float32": 2.0**-22, "float64": 2.0**-51}
_BYTES_PER_SCORE, _BYTES_PER_ROW_ENTRY = 88, 40  # measured: 83 and 34, with every option

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor should hold: float64 `want`, within `budget`, where `promised` is True.

    A NaN or Inf that a row sees makes that row non-finite; what it does to other rows of the same
    batch row and head is not promised.
    """

    want: torch.Tensor
    budget: float
    promised: torch.Tensor


def expectations(
    problem: Problem,
    x: Inputs,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> dict[str, Expected]:
    """out and lse; with dout also dq, dk, dv, and dbias and dsinks where bias and sinks are given.

    Tensors are in canonical form (see tensors.py). Materialises: see `bytes_needed`.
    """
    want = _want(problem, x, dout, dlse)
    error = {n: _largest(t - want[n]) for n, t in plain.attention(problem, x, dout, dlse).items()}
    score, term = _sizes(problem, x, dout, dlse, want)
    promised = _promised(problem, want)
    budget = {"lse": _T_LSE[problem.lse_dtype] * (1 + score)}
    for name, e in error.items():
        u, t = _units(problem, x, name)
        budget[name] = 2 * e + (u + t * (1 + score)) * term[name]
    return {name: Expected(want[name], budget[name], promised[name]) for name in want}


def bytes_needed(problem: Problem) -> int:
    """An upper bound, from shapes alone, of the memory that `expectations` takes at its peak."""
    scores = [len(p.batch) * problem.heads_q * p.len_q * p.len_k for p in parts(problem)]
    tokens = problem.tokens_q + problem.tokens_k
    rows = problem.heads_q * tokens * (problem.dim + problem.dim_v)
    return max(scores, default=0) * _BYTES_PER_SCORE + rows * _BYTES_PER_ROW_ENTRY


def _want(
    problem: Problem, x: Inputs, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> Tensors:
    out, lse = forward64(problem, x)
    want = {"out": out, "lse": lse}
    if dout is not None:
        wanted = Wanted(bias=x.bias is not None, sinks=x.sinks is not None)
        g = backward64(problem, x, out, lse, dout, dlse, wanted)
        found = {"dq": g.dq, "dk": g.dk, "dv": g.dv, "dbias": g.dbias, "dsinks": g.dsinks}
        want |= {name: t for name, t in found.items() if t is not None}
    return want


def _units(problem: Problem, x: Inputs, name: str) -> tuple[float, float]:
    own = {"dbias": x.bias, "dsinks": x.sinks}.get(name)
    dtypes = {problem.dtype}
    if own is not None:
        dtypes.add(str(own.dtype).removeprefix("torch."))
    return max(_U[d] for d in dtypes), max(_T[d] for d in dtypes)


def _sizes(
    problem: Problem,
    x: Inputs,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    want: Tensors,
) -> tuple[float, dict[str, float]]:
    """S, and A by the tensor's name. What is not finite counts as 0."""
    score = max(_largest(sink_logits(problem, x)), _largest(want["lse"]))
    terms = dict.fromkeys(want, 0.0)
    summed = {name: torch.zeros_like(want[name]) for name in ("dbias", "dsinks") if name in want}

    def note(name: str, values: torch.Tensor) -> None:
        terms[name] = max(terms[name], _largest(values))

    for part in parts(problem):
        q, out, lse = (part.of_q(t) for t in (x.q, want["out"], want["lse"]))
        q, k, v = (_cleared(exact(t)) for t in (q, part.of_k(x.k), part.of_k(x.v)))
        k, v = per_query_head(problem, k), per_query_head(problem, v)
        scores, dropout = pair_scores(problem, part, x), dropout_factor(problem, part, x)
        p = _cleared(probabilities(scores, lse))
        for size in (scores.s, problem.scale * q.abs() @ k.abs().mT):
            score = max(score, _largest(size.masked_fill(~scores.visible, 0)))
        note("out", (p * dropout) @ v.abs())
        if dout is None:
            continue
        do = _cleared(exact(part.of_q(dout)))
        row = (do * _cleared(exact(out))).abs().sum(-1)
        if dlse is not None:
            row = row + _cleared(exact(part.of_q(dlse))).abs()
        ds = p * (((do @ v.mT) * dropout).abs() + row[..., None])
        note("dq", problem.scale * ds @ k.abs())
        note("dk", problem.scale * per_key_head(problem, ds.mT @ q.abs()))
        note("dv", per_key_head(problem, (p * dropout).mT @ do.abs()))
        if "dbias" in summed:
            target = part.of_pairs(summed["dbias"])
            target += ds.sum_to_size(target.shape)
        if "dsinks" in summed:
            p_sink = _cleared((sink_logits(problem, x)[..., 0] - lse).exp())
            summed["dsinks"] += (p_sink * row).sum((0, 2))
    return score, terms | {name: _largest(values) for name, values in summed.items()}


def _promised(problem: Problem, want: Tensors) -> Tensors:
    """True but for the finite entries of a batch row and head in which a row is not finite."""
    promised = {name: torch.ones_like(t, dtype=torch.bool) for name, t in want.items()}
    rows = [name for name in ("out", "lse", "dq") if name in want]
    for part in parts(problem):
        heads = torch.stack([_holds_nan(part.of_q(want[name])) for name in rows]).any(0)
        if not heads.any():
            continue
        for name, whole in promised.items():
            if name == "dsinks":
                of, spoiled = whole, heads.any(0)
            elif name == "dbias":
                pairs = heads[..., None, None].double().expand(-1, -1, part.len_q, part.len_k)
                of = part.of_pairs(whole)
                spoiled = pairs.sum_to_size(of.shape) > 0
            elif name in ("dk", "dv"):
                of = part.of_k(whole)
                spoiled = heads.reshape(len(heads), problem.heads_kv, problem.group).any(-1)
            else:
                of, spoiled = part.of_q(whole), heads
            of &= ~spoiled.reshape(spoiled.shape + (1,) * (of.dim() - spoiled.dim()))
    return {name: flags | want[name].isnan() for name, flags in promised.items()}


def _holds_nan(t: torch.Tensor) -> torch.Tensor:
    """(B, H) of a (B, H, L, ...)."""
    return t.isnan().flatten(2).any(-1)


def _largest(t: torch.Tensor) -> float:
    """max |t| over its finite values; 0 of none."""
    return float(_cleared(t).abs().max()) if t.numel() else 0.0


def _cleared(t: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0)

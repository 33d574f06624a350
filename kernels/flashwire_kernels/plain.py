"""Plain materialised attention, as one would write it in PyTorch, in the request's own dtype.

The error budget measures its error: a fast backend may be about as wrong as this, not more.
Products, p and the gradients (by autograd) are in q's dtype; bias and ALiBi are added in float32 or
wider. NaN and Inf count as 0, so that this stays finite wherever the reference does.
"""

from __future__ import annotations

import torch

# torch.autograd loads it at its first use. What fails half way then, for want of a file descriptor
# or of memory, stays broken for as long as the process lives.
import torch.fx.experimental.symbolic_shapes

from flashwire_kernels.reference import (
    Part,
    distance,
    dropout_factor,
    parts,
    per_query_head,
    visible_pairs,
)
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


def attention(
    problem: Problem,
    x: Inputs,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """out, and with dout also dq, dk, dv, dbias and dsinks (of a bias and sinks that are given).

    Canonical form, each in its own dtype.
    """
    inputs = {"q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "sinks": x.sinks}
    given = {name: t for name, t in inputs.items() if t is not None}
    out = torch.zeros(x.q.shape[:-1] + x.v.shape[-1:], dtype=x.q.dtype, device=x.q.device)
    sums = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in given.items()}
    for part in parts(problem):
        # Leaves of a graph must be made outside inference mode, whatever mode the caller is in.
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {n: _leaf(_view(part, n, t)) for n, t in given.items()}
            part_out, part_lse = _forward(problem, part, x, leaves)
            grads: tuple[torch.Tensor, ...] = ()
            if dout is not None:
                upstream = [_finite(part.of_q(dout)), torch.zeros_like(part_lse)]
                if dlse is not None:
                    upstream[1] = _finite(part.of_q(dlse)).to(part_lse.dtype)
                grads = torch.autograd.grad((part_out, part_lse), list(leaves.values()), upstream)
        part.of_q(out).copy_(part_out.detach())
        for name, grad in zip(leaves, grads, strict=False):
            _view(part, name, sums[name]).add_(grad)
    if dout is None:
        return {"out": out}
    return {"out": out} | {f"d{name}": sums[name].to(t.dtype) for name, t in given.items()}


def _forward(
    problem: Problem, part: Part, x: Inputs, leaves: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = leaves["q"], *(per_query_head(problem, leaves[name]) for name in "kv")
    wide = torch.promote_types(q.dtype, torch.float32)
    s = problem.scale * (q @ k.mT)
    if problem.spec.softcap is not None:
        s = problem.spec.softcap * torch.tanh(s / problem.spec.softcap)
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes
        if slopes.dim() == 2:
            slopes = slopes[part.batch.start : part.batch.stop]
        s = (
            s.to(wide)
            - _finite(slopes).to(wide)[..., None, None] * distance(problem, part, x).abs()
        )
    if "bias" in leaves:
        s = s.to(wide) + leaves["bias"].to(wide)
    visible = visible_pairs(problem, part, x).expand(s.shape)
    s = s.masked_fill(~visible, -torch.inf)
    if "sinks" in leaves:
        sinks = leaves["sinks"][:, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat([s, sinks.to(s.dtype)], -1)
    # A row of nothing but -inf has a softmax of NaN; as a row of zeros its gradient stays clean.
    s = s.masked_fill((s == -torch.inf).all(-1, keepdim=True), 0)
    p = torch.softmax(s, -1)[..., : k.shape[-2]].masked_fill(~visible, 0)
    p = (p * dropout_factor(problem, part, x).to(wide)).to(q.dtype)
    return p @ v, torch.logsumexp(s.to(wide), -1)


def _view(part: Part, name: str, t: torch.Tensor) -> torch.Tensor:
    """The part's view of the tensor called name."""
    if name == "sinks":
        return t
    if name == "bias":
        return part.of_pairs(t)
    return part.of_q(t) if name == "q" else part.of_k(t)


def _leaf(t: torch.Tensor) -> torch.Tensor:
    """A copy to differentiate by. -inf stays: it hides a key, or is a sink that is none."""
    clean = torch.nan_to_num(t.detach(), nan=0.0, posinf=0.0, neginf=-torch.inf)
    return clean.contiguous().requires_grad_()


def _finite(t: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(t.detach(), nan=0.0, posinf=0.0, neginf=0.0).contiguous()

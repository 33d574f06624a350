"""PyTorch's own flash operator for CPUs, where it serves.

It serves attention without mask, bias, softcap, ALiBi or dropout whose keys are hidden, if at all,
only to the right of a diagonal. Keys before the diagonal's start are seen by every row:
they and the square behind them are two calls, united exactly by their lse.

Its sharp edges, kept away from here: no size may be 0 (it would kill the process), k must have v's
head dimension, and no row may see nothing (its lse would be 0). `Part` is cut so that every row
sees a key. A NaN score may be dropped where keys are few: a careful part is not for it.
"""

from __future__ import annotations

import torch

from flashwire_kernels.cpu.lse import union
from flashwire_kernels.cpu.part import Part

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def serves(part: Part) -> bool:
    """True when the operator can compute this part exactly."""
    extras = (part.mask, part.bias, part.softcap, part.slopes, part.dropout)
    return (
        not part.careful
        and all(extra is None for extra in extras)
        and part.band.left is None
        and part.k.shape[3] == part.v.shape[3]
        # It hides by adding -inf before it scales, which only a positive factor leaves -inf.
        and (part.band.right is None or part.scale >= torch.finfo(part.q.dtype).tiny)
    )


def forward(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a part that `serves` accepts."""
    pieces = [
        _forward(part.q, part.k[:, :, keys], part.v[:, :, keys], 0.0, causal, scale=part.scale)
        for keys, causal in _pieces(part)
    ]
    if len(pieces) == 1:
        return pieces[0][0], pieces[0][1]
    (out_a, lse_a), (out_b, lse_b) = pieces
    lse = union(lse_a, lse_b)
    out = out_a.mul_((lse_a - lse).exp_()[..., None])
    return out.addcmul_(out_b, (lse_b - lse).exp_()[..., None]), lse


def backward(
    part: Part, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a part that `serves` accepts, given its own or a larger union's out, lse."""
    q, k, v = part.q, part.k, part.v
    alone = q.shape[0] * k.shape[1] == 1
    if alone:
        # One head alone would run on several threads of MKL, with other bits than among others.
        q, k, v, out, dout = (t.expand(2, -1, -1, -1) for t in (q, k, v, out, dout))
        lse = lse.expand(2, -1, -1)
    pieces = [
        _backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, causal, scale=part.scale)
        for keys, causal in _pieces(part)
    ]
    if len(pieces) == 1:
        dq, dk, dv = pieces[0]
    else:
        (dq, dk_a, dv_a), (dq_b, dk_b, dv_b) = pieces
        dq = dq.add_(dq_b)
        dk, dv = torch.cat([dk_a, dk_b], 2), torch.cat([dv_a, dv_b], 2)
    return (dq[:1], dk[:1], dv[:1]) if alone else (dq, dk, dv)


def _pieces(part: Part) -> list[tuple[slice, bool]]:
    """(keys, whether row i of the piece sees only its keys up to i)."""
    if part.band.right is None:
        return [(slice(None), False)]
    seen_by_all = part.band.offset + part.band.right
    square = (slice(seen_by_all, None), True)
    return [square] if seen_by_all == 0 else [(slice(0, seen_by_all), False), square]

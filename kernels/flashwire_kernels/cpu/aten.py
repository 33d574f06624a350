"""PyTorch's own flash operator for CPUs, where it serves.

It serves attention without mask, bias, softcap, ALiBi or dropout whose keys are hidden, if at all,
only to the right of a diagonal. Keys before the diagonal's start are seen by every row:
they and the square behind them are two calls, united exactly by their lse.

Its sharp edges, kept away from here: no size may be 0 (it would kill the process), k must have v's
head dimension, and no row may see nothing (its lse would be 0). `Part` is cut so that every row
sees a key. A NaN score may be dropped where keys are few: a careful part is not for it.

Equal rows get equal bits in any company, which its parallelism endangers twice. A head alone is no
parallel work: MKL would then use its own threads, with other bits than on one. And the scratch
memory of each thread but the first begins where that of the one before ends: at a cache line, or
MKL's bits would depend on which thread a row falls to.
"""

from __future__ import annotations

import itertools

import torch

from flashwire_kernels.cpu.lse import union
from flashwire_kernels.cpu.part import LINE, Part, aligned

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ROWS, _KEYS = 32, 512  # of a tile at least, where there are so many rows, and at most so many keys


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
        and not _mostly_padding(part)
    )


def forward(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a part that `serves` accepts."""
    q, k, v = part.q, part.k, part.v
    rows, heads = q.shape[2], q.shape[0] * q.shape[1]
    if rows < _ROWS:
        q = aligned(q, q.dtype, _whole_rows(part))
        if heads == 1 and torch.get_num_threads() > 1:
            q, k, v = _doubled(q, k, v)
    pieces = [
        _forward(q, k[:, :, keys], v[:, :, keys], 0.0, causal, scale=part.scale)
        for keys, causal in _pieces(part)
    ]
    if q is not part.q:
        batch = part.q.shape[0]
        pieces = [(out[:batch, :, :rows], lse[:batch, :, :rows]) for out, lse in pieces]
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
    alone = q.shape[0] * k.shape[1] == 1 and torch.get_num_threads() > 1
    if alone:
        q, k, v, out, dout, lse = _doubled(q, k, v, out, dout, lse)
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


def _mostly_padding(part: Part) -> bool:
    """Whether `tiled` is faster, by what rows have to be added: for a single query, mostly."""
    return part.k.shape[2] > _KEYS and _whole_rows(part) >= 8 * part.q.shape[2]


def _whole_rows(part: Part) -> int:
    """As many rows as there are, or the next number whose tile fills whole cache lines: of scores,
    a maximum and a sum of each row, and the row of out, which is `aligned`.
    """
    per_line = LINE // part.q.dtype.itemsize
    tile_keys = [min(len(range(part.k.shape[2])[keys]), _KEYS) for keys, _ in _pieces(part)]
    return next(
        rows
        for rows in itertools.count(part.q.shape[2])
        if all(rows * (keys + 2) % per_line == 0 for keys in tile_keys)
    )


def _doubled(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """A batch of one as a batch of two."""
    return [t.expand(2, *t.shape[1:]) for t in tensors]

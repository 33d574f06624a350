"""A problem as batches of equally long sequences, each seen as (B, H, L, ...)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashwire_kernels.tensors import Inputs
from flashwire_kernels.validation import Problem


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of len_q queries and len_k keys.

    index            their rows of the batch, or their places in the packing
    first_q, first_k where each starts in a packed tensor; None for dense tensors, taken whole
    """

    index: Sequence[int]
    len_q: int
    len_k: int
    first_q: Sequence[int] | None = None
    first_k: Sequence[int] | None = None

    def queries(self, t: torch.Tensor) -> torch.Tensor:
        """(B, H, Lq, ...) of a tensor with a row per query."""
        return _take(t, self.first_q, self.len_q)

    def keys(self, t: torch.Tensor) -> torch.Tensor:
        """(B, H, Lk, ...) of a tensor with a row per key."""
        return _take(t, self.first_k, self.len_k)

    def put_queries(self, into: torch.Tensor, value: torch.Tensor) -> None:
        """Write `value` (B, H, Lq, ...) where `queries` reads."""
        _put(into, self.first_q, self.len_q, value)

    def put_keys(self, into: torch.Tensor, value: torch.Tensor) -> None:
        """Write `value` (B, H, Lk, ...) where `keys` reads."""
        _put(into, self.first_k, self.len_k, value)

    def pairs(self, t: torch.Tensor) -> torch.Tensor:
        """The view (B or 1, Hq or 1, Lq or 1, Lk or 1) of a mask or bias; never expanded."""
        t = t[(None,) * (4 - t.dim())]
        if self.first_q is None:
            return t
        if t.shape[0] != 1:
            t = t[self.index[0] : self.index[0] + 1]
        if t.shape[2] != 1:
            t = t[:, :, : self.len_q]
        return t[..., : self.len_k] if t.shape[3] != 1 else t


def batches(problem: Problem, x: Inputs) -> Iterator[Batch]:
    """The batches of a problem, each sequence in one. Empty ones may be among them.

    Equally long packed sequences go together, unless a mask or bias differs between them: then
    only one sequence at a time can read it as a view.
    """
    if not problem.packed:
        yield Batch(range(problem.batch), problem.len_q, problem.len_k)
        return
    offsets_q, offsets_k = problem.offsets_q or (0,), problem.offsets_k or (0,)
    alone = any(t is not None and t.dim() == 4 and t.shape[0] > 1 for t in (x.mask, x.bias))
    places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for b, lengths in enumerate(problem.sequences):
        places[(*lengths, b) if alone else lengths].append(b)
    for (len_q, len_k, *_), index in places.items():
        first_q, first_k = ([offsets[b] for b in index] for offsets in (offsets_q, offsets_k))
        yield Batch(index, len_q, len_k, first_q, first_k)


def _take(t: torch.Tensor, first: Sequence[int] | None, length: int) -> torch.Tensor:
    if first is None:
        return t
    if len(first) == 1:
        return t[first[0] : first[0] + length].transpose(0, 1)[None]
    rows = t[_rows(first, length, t.device)]
    return rows.view(len(first), length, *t.shape[1:]).transpose(1, 2)


def _put(into: torch.Tensor, first: Sequence[int] | None, length: int, value: torch.Tensor) -> None:
    if first is None:
        into.copy_(value)
    elif len(first) == 1:
        into[first[0] : first[0] + length] = value[0].transpose(0, 1)
    else:
        rows = value.transpose(1, 2).flatten(0, 1).to(into.dtype)
        into[_rows(first, length, into.device)] = rows


def _rows(first: Sequence[int], length: int, device: torch.device) -> torch.Tensor:
    starts = torch.tensor(first, dtype=torch.int64, device=device)
    return (starts[:, None] + torch.arange(length, device=device)).flatten()

"""Several attentions as one packed problem, and what each of them gets of its results.

Copies the tensors into one packing. Which problems may share one is company.py's to say.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashwire_kernels import company
from flashwire_kernels.api import Call, header, load, without_autocast
from flashwire_kernels.tensors import Gradients, Inputs, Wanted
from flashwire_kernels.validation import Problem

_TAME = 1e15  # squares of smaller numbers, and sums of many of these, are finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a backward is given, in its caller's layout: see api.backward."""

    dout: torch.Tensor
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    dlse: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Packing:
    """Calls of one kind, and the packed problem that they make together.

    Results come back in each call's own layout and rank, in the order of the calls, as views of
    memory that they share.
    """

    calls: Sequence[Call]
    backend: str
    problem: Problem
    inputs: Inputs

    @classmethod
    def of(cls, calls: Sequence[Call], backend: str) -> Packing | None:
        """None when `backend` must not compute them together: their kinds differ; or some values
        are such that the cpu backend takes care of them, which it does for all that are alike.
        """
        kinds = {company.kind(call.problem, backend) for call in calls}
        if len(kinds) != 1 or None in kinds:
            return None
        q, k, v = (_joined([getattr(c.inputs, name) for c in calls], calls) for name in "qkv")
        slopes = _slopes(calls)
        problem = _together([call.problem for call in calls], slopes)
        if {company.kind(problem, backend)} != kinds or (backend == "cpu" and not _tame(q, k)):
            return None
        return cls(calls, backend, problem, Inputs(q=q, k=k, v=v, alibi_slopes=slopes))

    @torch.no_grad()
    def forward(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(out, lse) of each call."""
        with without_autocast(self.inputs.q.device.type):
            out, lse = load(self.backend).forward(self.problem, self.inputs)
        pairs = zip(self.calls, self._queries(out), self._queries(lse), strict=True)
        return [(call.restore(o), call.restore_lse(n)) for call, o, n in pairs]

    @torch.no_grad()
    def backward(self, saved: Sequence[Saved]) -> list[Gradients]:
        """dq, dk and dv of each call. All of `saved` have the same members.

        Raises InvalidAttention for what does not fit its call.
        """
        for call, own in zip(self.calls, saved, strict=True):
            call.check_saved(own.dout, own.out, own.lse, own.dlse)
        dout, out, lse, dlse = (self._given(name, saved) for name in ("dout", "out", "lse", "dlse"))
        runner = load(self.backend)
        with without_autocast(self.inputs.q.device.type):
            if out is None or lse is None:
                out, lse = runner.forward(self.problem, self.inputs)
            if dout is None:
                raise ValueError("a backward needs dout")
            found = runner.backward(self.problem, self.inputs, out, lse, dout, dlse, Wanted())
        rows = zip(
            self.calls,
            self._queries(found.dq),
            self._keys(found.dk),
            self._keys(found.dv),
            strict=True,
        )
        return [
            Gradients(dq=call.restore(dq), dk=call.restore(dk), dv=call.restore(dv))
            for call, dq, dk, dv in rows
        ]

    def _given(self, name: str, saved: Sequence[Saved]) -> torch.Tensor | None:
        """A member of all of `saved`, packed."""
        given = [t for own in saved if (t := getattr(own, name)) is not None]
        if not given:
            return None
        of_numbers = name in ("lse", "dlse")
        views = [
            call.view_lse(t) if of_numbers else call.view(t)
            for call, t in zip(self.calls, given, strict=True)
        ]
        return _joined(views, self.calls)

    def _queries(self, t: torch.Tensor) -> list[torch.Tensor]:
        """What each call has of a tensor with a row per query, in canonical form."""
        return self._parts(t, [call.problem.tokens_q for call in self.calls])

    def _keys(self, t: torch.Tensor) -> list[torch.Tensor]:
        """What each call has of a tensor with a row per key, in canonical form."""
        return self._parts(t, [call.problem.tokens_k for call in self.calls])

    def _parts(self, t: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
        parts = torch.split(t, tokens)
        return [_dense(part, call.problem) for call, part in zip(self.calls, parts, strict=True)]


def _dense(rows: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Packed rows (T, H, ...) of one call in its canonical form."""
    if problem.packed:
        return rows
    return rows.view(problem.batch, -1, *rows.shape[1:]).transpose(1, 2)


def _joined(tensors: Sequence[torch.Tensor], calls: Sequence[Call]) -> torch.Tensor:
    """Canonical tensors, one per call, as packed rows (T, H, ...)."""
    rows = [
        t if call.problem.packed else t.transpose(1, 2).flatten(0, 1)
        for call, t in zip(calls, tensors, strict=True)
    ]
    return torch.cat(rows).contiguous()


def _slopes(calls: Sequence[Call]) -> torch.Tensor | None:
    """ALiBi's slopes of every sequence, (B, Hq)."""
    rows = [
        slopes.expand(call.problem.batch, -1)
        for call in calls
        if (slopes := call.inputs.alibi_slopes) is not None
    ]
    return torch.cat(rows) if rows else None


def _together(problems: Sequence[Problem], slopes: torch.Tensor | None) -> Problem:
    """The packed problem of several of one kind."""
    lengths = [
        pair
        for p in problems
        for pair in (p.sequences if p.packed else [(p.len_q, p.len_k)] * p.batch)
    ]
    offsets_q, offsets_k = (
        tuple(itertools.accumulate((pair[i] for pair in lengths), initial=0)) for i in (0, 1)
    )
    return dataclasses.replace(
        problems[0],
        spec=dataclasses.replace(problems[0].spec, layout=None),
        rank=3,
        batch=len(lengths),
        len_q=max(len_q for len_q, _ in lengths),
        len_k=max(len_k for _, len_k in lengths),
        tokens_q=offsets_q[-1],
        tokens_k=offsets_k[-1],
        packed=True,
        offsets_q=offsets_q,
        offsets_k=offsets_k,
        alibi_slopes=None if slopes is None else header(slopes),
    )


def _tame(*tensors: torch.Tensor) -> bool:
    """Whether all values are finite, and far from making a product infinite."""
    extremes = (end.item() for t in tensors for end in torch.aminmax(t))
    return all(abs(end) < _TAME for end in extremes)

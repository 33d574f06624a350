"""Which attentions may be computed together, as one packed problem (packing.py), each with the bits
that it has when it is packed alone. No torch here.

A dense problem is packed row by row, each a sequence. What a packing has only one of, they must
have in common: dtype, heads, head dimensions, options. What counts sequences or adds up over all
of them keeps a problem alone: dropout, whose pattern depends on a sequence's place in its own
request; sinks, whose logits and gradient are one request's; mask and bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from flashwire_kernels.fused import support as fused_support
from flashwire_kernels.validation import Problem

SAME_BITS_DENSE = frozenset({"cpu"})
"""Backends that give a dense problem the bits of a packed one. Others run other code for each."""

_TOGETHER = frozenset({"cpu", "triton"})


def kind(problem: Problem, backend: str) -> Hashable | None:
    """What is equal for problems that `backend` may compute together; None for one that it may not.

    A packed problem's offsets must be known, and leave no rows beyond the last.
    """
    spec = problem.spec
    alone = (problem.mask, problem.bias, problem.sinks)
    if backend not in _TOGETHER or spec.dropout_p or any(header is not None for header in alone):
        return None
    if not (problem.tokens_q and problem.tokens_k and problem.heads_q) or not _ends_full(problem):
        return None
    return (
        backend,
        problem.dtype,
        problem.heads_q,
        problem.heads_kv,
        problem.dim,
        problem.dim_v,
        dataclasses.replace(spec, layout=None),
        problem.alibi_slopes and problem.alibi_slopes.dtype,
        fused_support.way(problem) if backend == "triton" else (),
    )


def _ends_full(problem: Problem) -> bool:
    if not problem.packed:
        return True
    ends = [offsets[-1] for offsets in (problem.offsets_q, problem.offsets_k) if offsets]
    return ends == [problem.tokens_q, problem.tokens_k]

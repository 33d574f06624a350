"""The triton backend: which kernels run, and the sums over what they leave."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

import torch

from flashwire_kernels.fused import config, decode, infinite
from flashwire_kernels.fused.arguments import in_vectors, padded
from flashwire_kernels.fused.dbias import bias_call
from flashwire_kernels.fused.forward import call as forward_call
from flashwire_kernels.fused.gradients import delta_call, row_numbers
from flashwire_kernels.fused.keys import keys_calls
from flashwire_kernels.fused.queries import queries_call
from flashwire_kernels.tensors import Gradients, Inputs, Wanted
from flashwire_kernels.validation import Problem


def forward(problem: Problem, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See tensors.Backend."""
    out = x.q.new_empty((*x.q.shape[:-1], problem.dim_v))
    lse = x.q.new_empty(x.q.shape[:-1], dtype=torch.float32)
    split = _config("decode", problem, x)
    with _on(x.q.device):
        if decode.serves(problem, split):
            for call in decode.calls(problem, x, out, lse, split):
                call.launch()
        else:
            counted = infinite.counts(problem, x)
            found = infinite.count(problem, x, _config("queries", problem, x)) if counted else None
            chosen = _config("forward", problem, x)
            forward_call(problem, x, found, out, lse, chosen).launch()
    _fill_rest(problem.offsets_q, out, 0)
    _fill_rest(problem.offsets_q, lse, -math.inf)
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
    dq, dk, dv = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v)
    )
    numbers = row_numbers(lse, problem.packed)
    saved = (dout, *numbers)
    terms = lse.new_zeros(lse.shape) if wanted.sinks and x.sinks is not None else None
    bias = _BiasSums(problem, x.bias) if wanted.bias and x.bias is not None else None
    by_key, by_query = (None, None) if bias is None else (bias.by_key, bias.by_query)
    queries = _config("queries", problem, x)
    with _on(x.q.device):
        delta_call(problem, out, lse, dout, dlse, numbers, queries).launch()
        for call in keys_calls(problem, x, saved, (dk, dv), by_key, _config("keys", problem, x)):
            call.launch()
        queries_call(problem, x, saved, dlse, dq, terms, by_query, queries).launch()
        if bias is not None and bias.pairs is not None:
            bias_call(problem, x, saved, bias.pairs).launch()
    _fill_rest(problem.offsets_q, dq, 0)
    _fill_rest(problem.offsets_k, dk, 0)
    _fill_rest(problem.offsets_k, dv, 0)
    dsinks = None
    if terms is not None and x.sinks is not None:
        rows = tuple(d for d in range(terms.dim()) if d != 1)
        dsinks = terms.sum(rows, dtype=torch.float64).to(x.sinks.dtype)
    return Gradients(
        dq=dq, dk=dk, dv=dv, dbias=None if bias is None else bias.total(), dsinks=dsinks
    )


class _BiasSums:
    """Where kernels leave the gradient of a bias: in its own place when it has an entry per pair,
    else summed over a head's queries, by_key, or keys, by_query; those are small enough to keep.
    """

    def __init__(self, problem: Problem, bias: torch.Tensor) -> None:
        self.bias = bias
        self.by_key: torch.Tensor | None = None
        self.by_query: torch.Tensor | None = None
        self.pairs: torch.Tensor | None = None
        *_, rows, cols = self.shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        heads = (problem.batch, problem.heads_q)
        if rows == problem.len_q and cols == problem.len_k:
            self.pairs = bias.new_empty(self.shape)
        elif cols == problem.len_k:
            self.by_key = bias.new_zeros((*heads, problem.len_k), dtype=torch.float32)
        else:
            self.by_query = bias.new_zeros((*heads, problem.len_q), dtype=torch.float32)

    def total(self) -> torch.Tensor:
        """dbias, in bias's shape and dtype."""
        if self.pairs is not None:
            return self.pairs.view(self.bias.shape)
        by_key, by_query = self.by_key, self.by_query
        wide = by_key[:, :, None, :] if by_key is not None else by_query[..., None]  # type: ignore[index]
        total = wide.double().sum_to_size(self.shape)
        return total.to(self.bias.dtype).view(self.bias.shape)


def _fill_rest(offsets: tuple[int, ...] | None, t: torch.Tensor, value: float) -> None:
    """Rows beyond the last offset."""
    if offsets is not None and offsets[-1] < len(t):
        t[offsets[-1] :] = value


def _config(kind: config.Pass, problem: Problem, x: Inputs) -> config.Config:
    modified = (
        not all(in_vectors(t) for t in (x.q, x.k, x.v))  # single numbers take registers, too
        or bool(problem.spec.dropout_p or problem.spec.softcap)
        or x.mask is not None
        or x.bias is not None
        or x.alibi_slopes is not None
    )
    dim = max(padded(problem.dim), padded(problem.dim_v))
    return config.choose(kind, _arch(x.q.device), x.q.element_size(), dim, modified=modified)


def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

"""Compare a backend, or a caller's own results, with the float64 reference or another backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch

from flashwire_kernels import api
from flashwire_kernels.budget import Expected, bytes_needed, expectations
from flashwire_kernels.errors import InvalidAttention, NotEnoughMemory, Violation
from flashwire_kernels.tensors import Skipped, Wanted
from flashwire_kernels.types import AttentionSpec
from flashwire_kernels.validation import OFFSETS

REFERENCE = "reference"
RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
Tensors = dict[str, torch.Tensor]


class Options(TypedDict, total=False):
    """What `api.forward` takes beside q, k, v, backend and memory_limit."""

    spec: AttentionSpec
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    cu_seqlens_q: api.Offsets | None
    cu_seqlens_k: api.Offsets | None


@dataclass(frozen=True, slots=True)
class Worst:
    """The entry that is furthest off."""

    index: tuple[int, ...]
    got: float
    want: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor. max_abs is inf where finite meets non-finite; rel is max_abs / max |want|."""

    max_abs: float
    rel: float
    budget: float
    passed: bool
    worst: Worst | None

    def to_json(self) -> dict[str, Any]:
        """With the keys of /attention/check. Floats may be NaN or infinite."""
        worst = self.worst and {
            "index": list(self.worst.index),
            "got": self.worst.got,
            "want": self.worst.want,
        }
        return {
            "max_abs": self.max_abs,
            "rel": self.rel,
            "budget": self.budget,
            "pass": self.passed,
            "worst": worst,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Every tensor compared. `got` and `want` are the two sides: a backend's name, or "mine"."""

    tensors: dict[str, Comparison]
    got: str
    want: str
    skipped: tuple[Skipped, ...] = ()
    precision: str = "ieee"  # of what this library computed

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.tensors.values())


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    backends: tuple[str, str] = ("auto", REFERENCE),
    mine: Mapping[str, torch.Tensor] | None = None,
    memory_limit: int | None = None,
    **options: Unpack[Options],
) -> Report:
    """Compare `backends[0]`, or `mine` (by names of RESULTS), with `backends[1]`.

    Other arguments are those of `api.forward`. With dout, gradients are compared too. `mine` is in
    the caller's layout and any float dtype; only what it holds is compared.
    An entry passes within the contract's budget (twice that where neither side is the reference),
    or where both sides are not finite; an lse of -inf must be -inf.

    Raises what `api.forward` and `api.backward` raise, and NotEnoughMemory before anything is
    materialised when memory_limit (bytes) does not allow it.
    """
    call = _resolve(q, k, v, options)
    _check_arguments(call, dout, dlse, mine)
    needed = bytes_needed(call.problem)
    if memory_limit is not None and needed > memory_limit:
        raise NotEnoughMemory(needed, memory_limit)

    def run(backend: str) -> _Side:
        return _run(backend, (q, k, v), dout, dlse, options, memory_limit)

    got = run(backends[0]) if mine is None else _Side("mine", dict(mine))
    expected = _expected(call, dout, dlse)
    exact = _Side(REFERENCE, {name: e.want for name, e in expected.items()})
    want = exact if backends[1] == REFERENCE else run(backends[1])
    rounded = sum(side.name != REFERENCE for side in (got, want))
    tensors = {
        name: compare(
            t, want.tensors[name], max(1, rounded) * expected[name].budget, expected[name].promised
        )
        for name, t in got.tensors.items()
    }
    return Report(
        tensors=tensors,
        got=got.name,
        want=want.name,
        skipped=got.skipped,
        precision=got.precision if mine is None else want.precision,
    )


def compare(
    got: torch.Tensor,
    want: torch.Tensor,
    budget: float,
    promised: torch.Tensor | None = None,
) -> Comparison:
    """Compare two tensors of a shape where `promised` is True.

    A value of `want` that got's dtype cannot hold counts as not finite.
    """
    if got.numel() == 0:
        return Comparison(0.0, 0.0, budget, True, None)
    g, w = got.double(), want.double()
    same_kind = g.isfinite() == w.to(got.dtype).isfinite()
    off = (g - w).abs().masked_fill(~g.isfinite() & same_kind, 0)
    off = off.masked_fill(~same_kind | ((w == -torch.inf) & (g != w)), torch.inf)
    if promised is not None:
        off = off.masked_fill(~promised, 0)
    index = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    max_abs = float(off[index])
    largest = float(w.abs().nan_to_num(0, 0, 0).max())
    rel = max_abs / largest if largest else (0.0 if max_abs == 0 else math.inf)
    worst = Worst(index, float(g[index]), float(w[index]))
    return Comparison(max_abs, rel, budget, max_abs <= budget, worst)


@dataclass(frozen=True, slots=True)
class _Side:
    """Results in the caller's layout, and whose they are."""

    name: str
    tensors: Tensors
    skipped: tuple[Skipped, ...] = ()
    precision: str = "ieee"


def _resolve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> api.Call:
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, **options}
    spec = tensors.pop("spec", AttentionSpec())
    offsets = {name: tensors.pop(name, None) for name in OFFSETS}
    return api.Call.of(spec, tensors, offsets)


def _check_arguments(
    call: api.Call,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    mine: Mapping[str, torch.Tensor] | None,
) -> None:
    """Raise InvalidAttention for every way in which these do not fit."""
    if dout is not None:
        call.check_saved(dout, None, None, dlse)
    problem, x = call.problem, call.inputs
    q, k, v = (call.restore(t) for t in (x.q, x.k, x.v))
    shapes = {"out": (*q.shape[:-1], problem.dim_v), "lse": call.restore_lse(x.q[..., 0]).shape}
    if dout is not None:
        shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        shapes |= {} if x.bias is None else {"dbias": x.bias.shape}
        shapes |= {} if x.sinks is None else {"dsinks": x.sinks.shape}
    wrong = []
    if dout is None and (dlse is not None or any(name[0] == "d" for name in mine or ())):
        wrong.append(Violation("dout", "is missing: gradients cannot be compared without"))
    known = ", ".join(RESULTS)
    if mine is not None and not mine:
        wrong.append(Violation("mine", f"holds nothing to compare; known: {known}"))
    for name, t in (mine or {}).items():
        if name not in RESULTS:
            wrong.append(Violation(f"mine.{name}", f"is no result of attention; known: {known}"))
        elif name in shapes and tuple(t.shape) != tuple(shapes[name]):
            text = f"must have shape {list(shapes[name])}, got {list(t.shape)}"
            wrong.append(Violation(f"mine.{name}", text))
        elif name not in shapes and dout is not None:
            wrong.append(Violation(f"mine.{name}", f"there is no {name[1:]} in the request"))
        if not t.dtype.is_floating_point:
            wrong.append(Violation(f"mine.{name}", f"must be floating point, got {t.dtype}"))
    if wrong:
        raise InvalidAttention(wrong)


def _expected(
    call: api.Call, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> dict[str, Expected]:
    """`expectations` in the caller's layout."""
    found = expectations(
        call.problem,
        call.inputs,
        None if dout is None else call.view(dout),
        None if dlse is None else call.view_lse(dlse),
    )
    restore = {"lse": call.restore_lse, "dbias": _as_is, "dsinks": _as_is}
    return {
        name: Expected(
            want=restore.get(name, call.restore)(e.want),
            budget=e.budget,
            promised=restore.get(name, call.restore)(e.promised),
        )
        for name, e in found.items()
    }


def _as_is(t: torch.Tensor) -> torch.Tensor:
    return t


def _run(
    backend: str,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    options: Options,
    memory_limit: int | None,
) -> _Side:
    forward = api.forward(*qkv, **options, backend=backend, memory_limit=memory_limit)
    tensors = {"out": forward.out, "lse": forward.lse}
    if dout is not None:
        g = api.backward(
            dout,
            *qkv,
            out=forward.out,
            lse=forward.lse,
            dlse=dlse,
            wanted=Wanted(
                bias=options.get("bias") is not None, sinks=options.get("sinks") is not None
            ),
            **options,
            backend=forward.backend,
            memory_limit=memory_limit,
        ).gradients
        found = {"dq": g.dq, "dk": g.dk, "dv": g.dv, "dbias": g.dbias, "dsinks": g.dsinks}
        tensors |= {name: t for name, t in found.items() if t is not None}
    return _Side(forward.backend, tensors, forward.skipped, forward.precision)

"""Attention and its gradients: validation, canonical views, dispatch.

Tensors are read as they lie, in the caller's layout and rank, and results come back so.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch

from flashwire_kernels import support
from flashwire_kernels.errors import (
    InvalidAttention,
    NotEnoughMemory,
    UnsupportedBackend,
    Violation,
)
from flashwire_kernels.tensors import (
    Backend,
    Backward,
    Forward,
    Gradients,
    Inputs,
    Skipped,
    Wanted,
)
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import OFFSETS, Problem, resolve

Offsets = torch.Tensor | Sequence[int]

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "triton": "flashwire_kernels.fused.backend",
        "cpu": "flashwire_kernels.cpu",
        "reference": "flashwire_kernels.reference",
    }
)
_PLAIN = AttentionSpec()


@torch.no_grad()
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    spec: AttentionSpec = _PLAIN,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
    backend: str = "auto",
    memory_limit: int | None = None,
) -> Forward:
    """Attention of q (B, Hq, Lq, D), k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv).

    Also (B, L, H, D) with layout="blhd", rank 3 or 2 without batch or heads, or packed (T, H, D)
    with both cu_seqlens. mask (bool) and bias (float) broadcast to (B, Hq, Lq, Lk); alibi_slopes is
    (Hq,) or (B, Hq), sinks (Hq,). What each means stands in docs/contract.md, section 1.

    memory_limit bounds, in bytes, what the backend may need beside inputs and results.

    Raises InvalidAttention (all violations), UnsupportedBackend (all reasons), NotEnoughMemory.
    """
    call = Call.of(
        spec,
        {
            "q": q,
            "k": k,
            "v": v,
            "mask": mask,
            "bias": bias,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
        },
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
    )
    name, skipped = choose(backend, call.problem, q.device)
    _check_memory(name, call.problem, memory_limit, backward=False)
    with without_autocast(q.device.type):
        out, lse = load(name).forward(call.problem, call.inputs)
    return Forward(
        out=call.restore(out),
        lse=call.restore_lse(lse),
        backend=name,
        skipped=skipped,
        precision=support.precision(name, call.problem),
    )


@torch.no_grad()
def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008  # frozen
    spec: AttentionSpec = _PLAIN,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
    backend: str = "auto",
    memory_limit: int | None = None,
) -> Backward:
    """Gradients for dout, shaped like forward's out, and dlse, shaped like its lse.

    Everything else is as it was in `forward`. out and lse are forward's, or both absent: then they
    are computed again. dlse is ignored where lse is -inf.

    Raises what `forward` raises.
    """
    call = Call.of(
        spec,
        {
            "q": q,
            "k": k,
            "v": v,
            "mask": mask,
            "bias": bias,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
        },
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
    )
    call.check_saved(dout, out, lse, dlse)
    name, skipped = choose(backend, call.problem, q.device)
    recomputed = out is None or lse is None
    _check_memory(name, call.problem, memory_limit, backward=True, recomputed=recomputed)
    runner = load(name)
    seen_dlse = None if dlse is None else call.view_lse(dlse)
    with without_autocast(q.device.type):
        if out is None or lse is None:
            seen_out, seen_lse = runner.forward(call.problem, call.inputs)
        else:
            seen_out, seen_lse = call.view(out), call.view_lse(lse)
        found = runner.backward(
            call.problem, call.inputs, seen_out, seen_lse, call.view(dout), seen_dlse, wanted
        )
    gradients = Gradients(
        dq=call.restore(found.dq),
        dk=call.restore(found.dk),
        dv=call.restore(found.dv),
        dbias=found.dbias,
        dsinks=found.dsinks,
    )
    return Backward(
        gradients=gradients,
        backend=name,
        skipped=skipped,
        precision=support.precision(name, call.problem),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A valid problem and its tensors in canonical form."""

    problem: Problem
    inputs: Inputs

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        tensors: Mapping[str, torch.Tensor | None],
        offsets: Mapping[str, Offsets | None],
    ) -> Call:
        """Of tensors and offsets by their names in `forward`. Raises InvalidAttention."""
        given = {name: t for name, t in tensors.items() if t is not None}
        wrong = _check_kind(given)
        if wrong:
            raise InvalidAttention(wrong)
        values = {name: _as_integers(name, o) for name, o in offsets.items() if o is not None}
        headers = {name: header(t) for name, t in given.items()}
        headers |= {name: _offsets_header(o) for name, o in offsets.items() if o is not None}
        problem = resolve(spec, headers)
        if problem.packed:
            problem = problem.with_offsets(*(values[name] for name in OFFSETS))
        views = {name: _view(given[name], problem) for name in "qkv"}
        inputs = Inputs(**{**given, **views})
        return cls(problem, inputs)

    def view(self, t: torch.Tensor) -> torch.Tensor:
        """Canonical form of a tensor shaped like q or out."""
        return _view(t, self.problem)

    def view_lse(self, t: torch.Tensor) -> torch.Tensor:
        """Canonical form of a tensor shaped like lse."""
        return t if self.problem.packed else t[(None,) * (4 - self.problem.rank)]

    def restore(self, t: torch.Tensor) -> torch.Tensor:
        """The inverse of `view`."""
        if self.problem.packed:
            return t
        if self.problem.spec.layout == "blhd" and self.problem.rank != 2:
            t = t.transpose(1, 2)
        return t if self.problem.rank == 4 else t[(0,) * (4 - self.problem.rank)]

    def restore_lse(self, t: torch.Tensor) -> torch.Tensor:
        """The inverse of `view_lse`."""
        if self.problem.packed or self.problem.rank == 4:
            return t
        return t[(0,) * (4 - self.problem.rank)]

    def check_saved(
        self,
        dout: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> None:
        """Raise InvalidAttention for every way in which these do not fit the problem."""
        problem = self.problem
        like_q = self.restore(self.inputs.q)
        out_header = TensorHeader(problem.dtype, (*like_q.shape[:-1], problem.dim_v))
        lse_shape = self.restore_lse(self.inputs.q[..., 0]).shape
        lse_header = TensorHeader(problem.lse_dtype, tuple(lse_shape))
        saved = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
        given = {name: t for name, t in saved.items() if t is not None}
        wrong = _check_kind({"q": self.inputs.q, **given})
        if wrong:
            raise InvalidAttention(wrong)
        for name, t in given.items():
            want, got = lse_header if "lse" in name else out_header, header(t)
            if got.shape != want.shape:
                text = f"must have shape {list(want.shape)}, got {list(got.shape)}"
                wrong.append(Violation(name, text))
            if got.dtype != want.dtype:
                wrong.append(Violation(name, f"must be {want.dtype}, got {got.dtype}"))
        if (out is None) != (lse is None):
            absent, present = ("out", "lse") if out is None else ("lse", "out")
            wrong.append(Violation(absent, f"is missing: give it with {present}, or neither"))
        if wrong:
            raise InvalidAttention(wrong)


def header(t: torch.Tensor) -> TensorHeader:
    """dtype by its name in types.ITEM_SIZE, and shape."""
    return TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape))


def _view(t: torch.Tensor, problem: Problem) -> torch.Tensor:
    """(B, H, L, D), or packed (T, H, D), of a tensor in the caller's layout and rank."""
    if problem.packed:
        return t
    t = t[(None,) * (4 - problem.rank)]
    swap = problem.spec.layout == "blhd" and problem.rank != 2
    return t.transpose(1, 2) if swap else t


def _check_kind(tensors: Mapping[str, Any]) -> list[Violation]:
    wrong = [
        Violation(name, f"must be a torch.Tensor, got {type(t).__name__}")
        for name, t in tensors.items()
        if not isinstance(t, torch.Tensor)
    ]
    if wrong:
        return wrong
    if tensors["q"].is_meta:
        return [Violation("q", "is on the meta device, which holds no data")]
    for name, t in tensors.items():
        if t.layout is not torch.strided:
            wrong.append(Violation(name, f"must be dense in memory, got {t.layout}"))
        if t.device != tensors["q"].device:
            where = f"must be on q's device {tensors['q'].device}, got {t.device}"
            wrong.append(Violation(name, where))
    return wrong


def _as_integers(name: str, offsets: Offsets) -> list[int]:
    """The values of offsets; those of a tensor of another kind are for `resolve` to refuse."""
    if isinstance(offsets, torch.Tensor):
        return cast("list[int]", offsets.tolist())
    values = list(offsets)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in values):
        raise InvalidAttention([Violation(name, "must hold integers")])
    return values


def _offsets_header(offsets: Offsets) -> TensorHeader:
    if isinstance(offsets, torch.Tensor):
        return header(offsets)
    return TensorHeader("int64", (len(offsets),))


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Entering torch.autocast takes as long as a tenth of a small attention: only when it is on."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def choose(backend: str, problem: Problem, device: torch.device) -> tuple[str, tuple[Skipped, ...]]:
    """The backend that runs, and the faster ones that do not. Raises UnsupportedBackend."""
    if backend != "auto":
        why_not = support.reasons(backend, problem, str(device))
        if why_not:
            raise UnsupportedBackend(backend, why_not)
        return backend, ()
    skipped: list[Skipped] = []
    for name in support.BACKENDS:
        why_not = support.reasons(name, problem, str(device))
        if not why_not:
            return name, tuple(skipped)
        skipped.append(Skipped(backend=name, reasons=why_not))
    everything = [f"{skip.backend}: {reason}" for skip in skipped for reason in skip.reasons]
    raise UnsupportedBackend("auto", everything)


def _check_memory(
    name: str, problem: Problem, limit: int | None, *, backward: bool, recomputed: bool = False
) -> None:
    if limit is None:
        return
    needed = support.extra_bytes(name, problem, backward=backward, recomputed=recomputed)
    if needed > limit:
        raise NotEnoughMemory(needed, limit)


def load(name: str) -> Backend:
    """A backend by its name."""
    return cast("Backend", importlib.import_module(_MODULES[name]))

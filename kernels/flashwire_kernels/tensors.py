"""The tensors of one attention, and what comes back. What every backend takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from flashwire_kernels.validation import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Tensors in canonical form: dense q, k, v are (B, H, L, D), packed ones (T, H, D).

    Strides are arbitrary; q, k and v share a dtype and all tensors a device. mask and bias are as
    given, not expanded; offsets stand in the Problem.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Gradients to compute beside dq, dk and dv."""

    bias: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """dq, dk, dv in the inputs' dtype and shapes; dbias and dsinks in their own, when wanted."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A faster backend that did not run, and every reason why."""

    backend: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """out like q with v's head_dim; lse (B, Hq, Lq) or (Tq, Hq), float32 (float64 for float64)."""

    out: torch.Tensor
    lse: torch.Tensor
    backend: str
    skipped: tuple[Skipped, ...] = ()
    precision: str = "ieee"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Gradients in the caller's layout and rank, and what computed them."""

    gradients: Gradients
    backend: str
    skipped: tuple[Skipped, ...] = ()
    precision: str = "ieee"


class Backend(Protocol):
    """A way to compute a valid Problem that `support.reasons` has no objection to.

    Results own their memory. Equal inputs give equal bits, wherever they lie in memory.
    """

    def forward(self, problem: Problem, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), in canonical form."""
        ...

    def backward(
        self,
        problem: Problem,
        x: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """Gradients in canonical form. dout has out's shape, any strides; dlse lse's."""
        ...

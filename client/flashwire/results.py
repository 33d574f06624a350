"""What a client hands out. Arrays are NumPy or torch as the caller's own, writable, and owned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwire.tensors import Array


@dataclass(frozen=True, slots=True)
class Result:
    """One attention.

    out        like q with v's head_dim, in q's layout and dtype
    lse        natural log of each row's sum of exp(s), (B, Hq, Lq) or (Tq, Hq) packed, float32
               (float64 for float64); None unless `return_lse`
    residual   id of what the server keeps for backward; None unless `save_for_backward`
    meta       backend, device, skipped (faster backends, and why not), seed (of dropout),
               precision, timings_ms
    """

    out: Array
    lse: Array | None = None
    residual: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients in the shapes and dtypes of the inputs; dbias and dsinks only when asked for."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worst:
    """The element furthest from the reference."""

    index: tuple[int, ...]
    got: float
    want: float


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """One tensor against the reference: the largest error, absolute and relative, and its budget.

    `worst` is None for an empty tensor. `used` is the share of the budget that max_abs takes.
    """

    passed: bool
    max_abs: float
    rel: float
    budget: float
    worst: Worst | None = None

    @property
    def used(self) -> float:
        if self.max_abs == 0:
            return 0.0
        return self.max_abs / self.budget if self.budget else math.inf


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Two backends, or the caller's own results and the reference, compared tensor by tensor.

    str() is a table for people.
    """

    passed: bool
    tensors: Mapping[str, TensorCheck]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("tensor", "max abs", "relative", "budget", "used", "", "worst")]
        for name, found in self.tensors.items():
            numbers = (f"{x:.3g}" for x in (found.max_abs, found.rel, found.budget))
            worst = ""
            if found.worst is not None:
                at = list(found.worst.index)
                worst = f"at {at}: got {found.worst.got:.7g}, want {found.worst.want:.7g}"
            verdict = "ok" if found.passed else "OVER"
            rows.append((name, *numbers, f"{found.used:.2%}", verdict, worst))  # type: ignore[arg-type]
        verdict = "within budget" if self.passed else "over budget"
        if {"got", "want"} <= self.meta.keys():
            verdict = f"{self.meta['got']} against {self.meta['want']}: {verdict}"
        return f"{table(rows)}\n{verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an attention would cost, counted without computing it.

    visible_pairs          (query, key) pairs that are not hidden, over batch and heads
    flops_*                forward = 2 * visible pairs * (D + Dv), backward accordingly
    bytes_materialised_s   the N x N scores that a fast backend never writes
    bytes_out_lse          out and lse, in its place; materialised_ratio: how many times less
    bytes_min              every input and output moved once
    bytes_flash            memory traffic of the tiled algorithm at `sram_elements` of fast memory;
                           traffic_reduction: how many times less than materialising
    intensity              FLOPs per byte; peak_bytes: device memory needed
    wire_bytes_*           sizes of the request and of the reply
    """

    backend: str
    skipped: list[Mapping[str, Any]]
    visible_pairs: int
    flops_fwd: int
    flops_bwd: int
    bytes_materialised_s: int
    bytes_out_lse: int
    materialised_ratio: float
    bytes_min: int
    bytes_flash: int
    sram_elements: int
    traffic_reduction: float
    intensity: float
    peak_bytes: int
    tiles: Any
    wire_bytes_up: int
    wire_bytes_down: int
    estimated_ms: float | None


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)

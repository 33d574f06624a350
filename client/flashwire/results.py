"""What a client hands out. Arrays are NumPy or torch as the caller's own, writable, and owned."""

from __future__ import annotations

from collections.abc import Mapping
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

    `worst` is None for an empty tensor.
    """

    passed: bool
    max_abs: float
    rel: float
    budget: float
    worst: Worst | None = None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Two backends, or the caller's own results and the reference, compared tensor by tensor."""

    passed: bool
    tensors: Mapping[str, TensorCheck]
    meta: Mapping[str, Any] = field(default_factory=dict)


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

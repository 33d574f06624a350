"""What is audited: every shipped configuration, and forwards of the options that change the code.

A case is run through the backend itself, on tensors without memory, and its launches are recorded:
what is compiled is what would be launched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from flashwire_kernels.fused import backend
from flashwire_kernels.fused.call import Call
from flashwire_kernels.fused.config import PASSES, Pass, family
from flashwire_kernels.tensors import Inputs, Wanted
from flashwire_kernels.testing import resolve_tensors
from flashwire_kernels.types import AttentionSpec

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
DTYPES = {"half": torch.bfloat16, "single": torch.float32}
DIMS = (64, 128, 256)
BATCH, HEADS, LENGTH = 4, 16, 4096
OWNERS: dict[str, Pass] = {
    "keys_kernel": "keys", "decode_kernel": "decode", "merge_kernel": "decode",
}  # fmt: skip
"""Kernels that do not belong to the forward pass, when a forward launches them, or to the queries
pass, when a backward does.
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """Options beside the shapes of a plain call: (BATCH, HEADS, LENGTH, dim), self-attention.

    kinds      the passes that are compiled for it
    length_q   queries
    group      query heads per key head
    narrow     v has half of q's head dimension
    odd        rows lie where neither descriptors nor 16-byte loads reach
    modified   mask, bias, ALiBi, softcap, dropout and sinks, all at once; each gradient is wanted
    bias_rows  bias has a row for each query
    """

    name: str
    kinds: tuple[Pass, ...]
    options: dict[str, Any] = field(default_factory=dict)
    length_q: int = LENGTH
    group: int = 1
    packed: bool = False
    narrow: bool = False
    odd: bool = False
    modified: bool = False
    bias_rows: bool = False
    bias_cols: bool = True


_ROWS = {"length_q": 4, "group": 16}
_WORST: dict[str, Any] = {
    "causal": True, "window": (1024, None), "softcap": 30.0,
    "dropout_p": 0.1, "dropout_seed": 2**40,
}  # fmt: skip
_TRAINED: tuple[Pass, ...] = ("forward", "keys", "queries")

SHIPPED = (
    Variant("dense", _TRAINED),
    Variant("causal", _TRAINED, {"causal": True}),
    Variant("single", ("decode",), length_q=1),
    Variant("grouped", ("decode",), {"causal": True}, **_ROWS),
    Variant("modified", ("forward", "keys"), _WORST, group=2, modified=True),
    Variant(
        "modified", ("queries",), _WORST, group=2, modified=True, bias_rows=True, bias_cols=False
    ),
    Variant("modified", ("decode",), _WORST, modified=True, **_ROWS),
)
"""Together they use every shipped configuration."""

OTHERS = (
    Variant("packed", ("forward",), {"causal": True}, packed=True),
    Variant("window", ("forward",), {"window": (1024, 1024)}),
    Variant("gqa", ("forward",), {"causal": True}, group=4),
    Variant("watching", ("forward",), {"causal": True}, length_q=1024),
    Variant("narrow", ("forward",), narrow=True),
    Variant("odd", ("forward",), {"causal": True}, odd=True),
    Variant("tf32", ("forward",), {"precision": "tf32"}),
)
"""Code that other options give, of the same configurations."""

VARIANTS = SHIPPED + OTHERS


@dataclass(frozen=True, slots=True)
class Case:
    """A pass on an architecture; width is a key of DTYPES."""

    arch: str
    kind: Pass
    width: str
    dim: int
    variant: Variant

    def __str__(self) -> str:
        return f"{self.arch} {self.kind} {self.width} d{self.dim} {self.variant.name}"


def cases() -> Iterator[Case]:
    """All of them, in the order of the table."""
    for arch, kind, width, dim in itertools.product(ARCHES, PASSES, DTYPES, DIMS):
        for variant in VARIANTS:
            if kind in variant.kinds and (
                variant in SHIPPED or _audited(arch, width, dim, variant)
            ):
                yield Case(arch, kind, width, dim, variant)


def _audited(arch: str, width: str, dim: int, variant: Variant) -> bool:
    """Whether a variant beside the shipped ones is compiled there."""
    suits = width == ("single" if variant.name == "tf32" else "half")
    return suits and dim == 128


def calls(case: Case) -> list[Call]:
    """What the backend launches for the pass of a case, the kernel of the pass itself last."""
    problem, x = _inputs(case)
    with _recording(case.arch) as recorded:
        if case.kind in ("forward", "decode"):
            backend.forward(problem, x)
        else:
            out = x.q.new_empty((*x.q.shape[:-1], problem.dim_v))
            lse = x.q.new_empty(x.q.shape[:-1], dtype=torch.float32)
            wanted = Wanted(bias=case.variant.modified, sinks=case.variant.modified)
            dlse = lse if case.variant.modified else None
            backend.backward(problem, x, out, lse, torch.empty_like(out), dlse, wanted)
    others = "forward" if case.kind in ("forward", "decode") else "queries"
    found = [c for c in recorded if OWNERS.get(name(c), others) == case.kind]
    return sorted(found, key=lambda call: is_main(call, case.kind))


def name(call: Call) -> str:
    return str(call.kernel.__name__)


def is_main(call: Call, kind: Pass) -> bool:
    """Whether this is the kernel that a pass is named for."""
    return name(call) == f"{kind}_kernel"


@contextlib.contextmanager
def _recording(arch: str) -> Iterator[list[Call]]:
    """Launches are recorded in place of being made, by a backend that believes to be on `arch`."""
    recorded: list[Call] = []
    with (
        mock.patch.object(Call, "launch", lambda call: recorded.append(call)),
        mock.patch.object(backend, "_arch", return_value=arch),
    ):
        yield recorded


def _inputs(case: Case) -> tuple[Any, Inputs]:
    v, spec = case.variant, AttentionSpec(**case.variant.options)
    dtype, dim_v = DTYPES[case.width], case.dim // 2 if case.variant.narrow else case.dim
    heads_kv = HEADS // v.group
    tensors = {
        "q": _rows(v, HEADS, v.length_q, case.dim, dtype),
        "k": _rows(v, heads_kv, LENGTH, case.dim, dtype),
        "v": _rows(v, heads_kv, LENGTH, dim_v, dtype),
    }
    if v.modified:
        rows, cols = v.length_q if v.bias_rows else 1, LENGTH if v.bias_cols else 1
        tensors |= {
            "mask": _empty((BATCH, HEADS, v.length_q, LENGTH), torch.bool),
            "bias": _empty((BATCH, HEADS, rows, cols), dtype),
            "alibi_slopes": _empty((BATCH, HEADS), torch.float32),
            "sinks": _empty((HEADS,), torch.float32),
        }
    offsets = {}
    if v.packed:
        steps = torch.arange(BATCH + 1, dtype=torch.int32) * LENGTH
        offsets = {"cu_seqlens_q": steps, "cu_seqlens_k": steps}
    return resolve_tensors(spec, tensors | offsets), Inputs(**tensors)


def _rows(v: Variant, heads: int, length: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (BATCH * length, heads, dim) if v.packed else (BATCH, heads, length, dim)
    if v.odd:
        return _empty((*shape[:-1], dim + 2), dtype)[..., :dim]
    return _empty(shape, dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def configured_as(case: Case) -> str:
    """The family whose configuration a case runs with."""
    return family(case.arch)

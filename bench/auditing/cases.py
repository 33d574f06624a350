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
from flashwire_kernels.fused.config import PASSES, Pass
from flashwire_kernels.tensors import Inputs, Wanted
from flashwire_kernels.testing import resolve_tensors
from flashwire_kernels.types import AttentionSpec
from flashwire_kernels.validation import Problem

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
DTYPES = {"half": torch.bfloat16, "single": torch.float32}
DIMS = (64, 128, 256)
BATCH, HEADS, LENGTH = 4, 16, 4096

_OWNERS: dict[str, Pass] = {
    "keys_kernel": "keys", "decode_kernel": "decode", "merge_kernel": "decode",
}  # fmt: skip
"""Any other kernel is the forward pass's where a forward launches it, the queries pass's where a
backward does: those are whose configurations it runs with.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What differs from a plain self-attention of shape (BATCH, HEADS, LENGTH, dim).

    kinds     the passes that are compiled for it
    dims      and the head dimensions
    widths    and the keys of DTYPES
    only      the one kernel that is compiled, where the others are known from another variant
    plain     its steady loop is judged: nothing but products and a softmax belongs there
    length_q  queries
    group     query heads per key head
    dim_q     of dim, the part that q and k have
    dim_v     and v
    strides   "contiguous"; "broadcast" is one key head shown for all, which has no descriptors;
              "odd" puts rows where loads of 16 bytes do not reach them
    bias      the shape of a bias, by letters as in testing.Case. With it come a mask, ALiBi and
              sinks, and every gradient is wanted
    """

    name: str
    kinds: tuple[Pass, ...] = ("forward",)
    dims: tuple[int, ...] = (64, 128)
    widths: tuple[str, ...] = ("half",)
    only: str | None = None
    plain: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: torch.dtype | None = None
    length_q: int = LENGTH
    group: int = 1
    packed: bool = False
    dim_q: float = 1
    dim_v: float = 1
    strides: str = "contiguous"
    bias: str | None = None

    @property
    def modified(self) -> bool:
        """Whether it takes the configurations for modified scores."""
        return self.bias is not None


_EVERYWHERE: dict[str, Any] = {"dims": DIMS, "widths": tuple(DTYPES)}
_TRAINED: tuple[Pass, ...] = ("forward", "keys", "queries")
_ROWS: dict[str, Any] = {"length_q": 4, "group": 16}  # all that a decode takes
_CAUSAL = {"causal": True}
_WORST: dict[str, Any] = {
    "options": {
        "causal": True, "window": (1024, None), "softcap": 30.0,
        "dropout_p": 0.1, "dropout_seed": 2**40,
    },
    **_EVERYWHERE,
}  # fmt: skip

SHIPPED = (
    Variant(name="dense", kinds=_TRAINED, plain=True, dims=DIMS),
    Variant(name="causal", kinds=_TRAINED, plain=True, options=_CAUSAL, **_EVERYWHERE),
    Variant(name="one_row", kinds=("decode",), plain=True, length_q=1, **_EVERYWHERE),
    Variant(name="grouped", kinds=("decode",), plain=True, options=_CAUSAL, **_ROWS, **_EVERYWHERE),
    Variant(name="modified", kinds=("forward", "keys"), bias="bh1k", group=2, **_WORST),
    Variant(name="modified", kinds=("queries",), bias="bhq1", group=2, **_WORST),
    Variant(name="modified", kinds=("decode",), bias="bh1k", **_ROWS, **_WORST),
    Variant(name="pairs", kinds=("queries",), bias="bhqk", only="bias_kernel", **_WORST),
)
"""Together they use every shipped configuration."""

OTHERS = (
    Variant(name="packed", options=_CAUSAL, packed=True),
    Variant(name="window", options={"window": (1024, 1024)}),
    Variant(name="gqa", options=_CAUSAL, group=4),
    Variant(name="watching", options=_CAUSAL, length_q=1024),
    Variant(name="narrow", options=_CAUSAL, dim_v=1 / 2),
    Variant(name="padded", options=_CAUSAL, dim_q=5 / 8, dim_v=5 / 8),
    Variant(name="broadcast", options=_CAUSAL, strides="broadcast"),
    Variant(name="odd", options=_CAUSAL, strides="odd"),
    Variant(name="float16", options=_CAUSAL, dtype=torch.float16),
    Variant(name="tf32", kinds=_TRAINED, options={"precision": "tf32"}, widths=("single",)),
)
"""Code that other options and layouts give, of the same configurations."""

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
        for v in VARIANTS:
            if kind in v.kinds and width in v.widths and dim in v.dims:
                yield Case(arch, kind, width, dim, v)


def calls(case: Case) -> list[Call]:
    """What the backend launches for the pass of a case, the kernel of the pass itself last."""
    problem, x = _inputs(case)
    forward = case.kind in ("forward", "decode")
    with _recording(case.arch) as recorded:
        if forward:
            backend.forward(problem, x)
        else:
            _backward(case, problem, x)
    others: Pass = "forward" if forward else "queries"
    found = [c for c in recorded if _OWNERS.get(kernel_name(c), others) == case.kind]
    if case.variant.only is not None:
        found = [c for c in found if kernel_name(c) == case.variant.only]
    return sorted(found, key=lambda call: is_main(call, case.kind))


def kernel_name(call: Call) -> str:
    return str(call.kernel.__name__)


def is_main(call: Call, kind: Pass) -> bool:
    """Whether this is the kernel that a pass is named for."""
    return kernel_name(call) == f"{kind}_kernel"


def writes(call: Call) -> tuple[bool, bool]:
    """Whether a launch of the keys kernel writes dk, and dv."""
    given = dict(zip(call.kernel.arg_names, call.positional, strict=False))
    return given["dk"] is not None, given["dv"] is not None


def _backward(case: Case, problem: Problem, x: Inputs) -> None:
    every = case.variant.modified
    out = x.q.new_empty((*x.q.shape[:-1], problem.dim_v))
    lse = x.q.new_empty(x.q.shape[:-1], dtype=torch.float32)
    dlse = lse.new_empty(lse.shape) if every else None
    wanted = Wanted(bias=every, sinks=every)
    backend.backward(problem, x, out, lse, out.new_empty(out.shape), dlse, wanted)


@contextlib.contextmanager
def _recording(arch: str) -> Iterator[list[Call]]:
    """Launches are recorded in place of being made, by a backend that believes to be on `arch`."""
    recorded: list[Call] = []
    with (
        mock.patch.object(Call, "launch", lambda call: recorded.append(call)),
        mock.patch.object(backend, "_arch", return_value=arch),
    ):
        yield recorded


def _inputs(case: Case) -> tuple[Problem, Inputs]:
    v, dtype = case.variant, case.variant.dtype or DTYPES[case.width]
    dim_q, dim_v = (round(case.dim * part) for part in (v.dim_q, v.dim_v))
    tensors = {
        "q": _rows(v, HEADS, v.length_q, dim_q, dtype),
        "k": _rows(v, HEADS // v.group, LENGTH, dim_q, dtype, v.strides),
        "v": _rows(v, HEADS // v.group, LENGTH, dim_v, dtype, v.strides),
    }
    if v.bias is not None:
        sizes = {"b": BATCH, "h": HEADS, "q": v.length_q, "k": LENGTH, "1": 1}
        tensors |= {
            "mask": _empty((BATCH, HEADS, v.length_q, LENGTH), torch.bool),
            "bias": _empty(tuple(sizes[letter] for letter in v.bias), dtype),
            "alibi_slopes": _empty((BATCH, HEADS), torch.float32),
            "sinks": _empty((HEADS,), torch.float32),
        }
    offsets = {}
    if v.packed:
        steps = torch.arange(BATCH + 1, dtype=torch.int32) * LENGTH
        offsets = {"cu_seqlens_q": steps, "cu_seqlens_k": steps}
    problem = resolve_tensors(AttentionSpec(**v.options), tensors | offsets)
    return problem, Inputs(**tensors)


def _rows(
    v: Variant,
    heads: int,
    length: int,
    dim: int,
    dtype: torch.dtype,
    strides: str = "contiguous",
) -> torch.Tensor:
    if strides == "odd":
        return _empty((BATCH, heads, length, dim + 2), dtype)[..., :dim]
    if strides == "broadcast":
        return _empty((BATCH, 1, length, dim), dtype).expand(-1, heads, -1, -1)
    shape = (BATCH * length, heads, dim) if v.packed else (BATCH, heads, length, dim)
    return _empty(shape, dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

"""Seeded inputs for a described attention, and combinations of options that cover every pair."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from flashwire_kernels.reference import parts, visible_pairs
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.types import AttentionSpec, CausalAlign, Layout, TensorHeader
from flashwire_kernels.validation import Problem, resolve

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention, described. Packed when `lens_q` and `lens_k` are given, else dense.

    mask, bias   their shapes by letters: "bhqk" is full, "b11k" broadcasts over heads and queries,
                 "k" has rank 1
    alibi        slopes of shape "h" or "bh"
    sinks        one per head, the last of several heads' -inf: it has none
    padding      packed rows beyond the last offset
    blind_rows   with a mask: every fifth query sees nothing
    poison       NaN and Inf wherever nothing visible is: keys that no query sees, queries that see
                 no key (their dout and, without a sink, dlse too), rows beyond the last offset, and
                 bias that position or mask hides
    """

    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    len_q: int = 24
    len_k: int = 24
    lens_q: tuple[int, ...] | None = None
    lens_k: tuple[int, ...] | None = None
    padding: int = 0
    dim: int = 16
    dim_v: int | None = None
    dtype: str = "float32"
    layout: Layout | None = None
    rank: int = 4
    scale: float | None = None
    causal: bool = False
    causal_align: CausalAlign = "bottom_right"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dropout: float = 0.0
    alibi: str | None = None
    sinks: bool = False
    mask: str | None = None
    blind_rows: bool = True
    bias: str | None = None
    bias_dtype: str | None = None
    dlse: bool = True
    poison: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """What differs from the defaults: a test's id."""
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ",".join(changed).replace(" ", "") or "default"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a forward, by name and in the caller's layout; and of its backward."""

    spec: AttentionSpec
    tensors: dict[str, torch.Tensor]
    dout: torch.Tensor
    dlse: torch.Tensor | None


def make(case: Case) -> Call:
    """The call that a case describes, on the CPU. Equal cases give equal bits."""
    draw = _Draw(case)
    rows, optional = draw.rows(), draw.optional()
    spec = AttentionSpec(
        scale=case.scale,
        causal=case.causal,
        causal_align=case.causal_align,
        window=case.window,
        softcap=case.softcap,
        dropout_p=case.dropout,
        dropout_seed=2**40 + case.seed,
    )
    if case.poison:
        _poison(case, spec, rows, optional)
    called = {name: _as_called(case, t) for name, t in rows.items()}
    return Call(
        spec=dataclasses.replace(spec, layout=case.layout),
        tensors={name: called[name] for name in "qkv"} | optional,
        dout=called["dout"],
        dlse=called["dlse"] if case.dlse else None,
    )


def pairwise(options: Mapping[str, Sequence[Value]]) -> Iterator[dict[str, Value]]:
    """Combinations of one value per option in which every pair of values occurs. Deterministic."""
    names = list(options)
    missing = {  # a dict, for its order
        frozenset([(a, i), (b, j)]): None
        for a, b in itertools.combinations(names, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    while missing:
        chosen = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                gains = [
                    sum(frozenset([(name, i), other]) in missing for other in chosen.items())
                    for i in range(len(options[name]))
                ]
                chosen[name] = gains.index(max(gains))
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        yield {name: options[name][chosen[name]] for name in names}


class _Draw:
    """Random tensors of a case, in canonical form (see tensors.py)."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        self.sizes = {"b": case.batch, "h": case.heads_q, "q": case.len_q, "k": case.len_k, "1": 1}
        self.rows_q: tuple[int, ...] = (case.batch, case.heads_q, case.len_q)
        self.rows_k: tuple[int, ...] = (case.batch, case.heads_kv, case.len_k)
        self.offsets: dict[str, torch.Tensor] = {}
        if case.lens_q is not None and case.lens_k is not None:
            longest_q, longest_k = (max(lens, default=0) for lens in (case.lens_q, case.lens_k))
            self.sizes |= {"b": len(case.lens_q), "q": longest_q, "k": longest_k}
            self.rows_q = (sum(case.lens_q) + case.padding, case.heads_q)
            self.rows_k = (sum(case.lens_k) + case.padding, case.heads_kv)
            self.offsets["cu_seqlens_q"] = _offsets(case.lens_q)
            self.offsets["cu_seqlens_k"] = _offsets(case.lens_k)

    def rows(self) -> dict[str, torch.Tensor]:
        """q, k, v, dout and dlse."""
        dim, dim_v = self.case.dim, self.case.dim_v or self.case.dim
        lse_dtype = "float64" if self.case.dtype == "float64" else "float32"
        return {
            "q": self._normal((*self.rows_q, dim)),
            "k": self._normal((*self.rows_k, dim)),
            "v": self._normal((*self.rows_k, dim_v)),
            "dout": self._normal((*self.rows_q, dim_v)),
            "dlse": self._normal(self.rows_q, lse_dtype),
        }

    def optional(self) -> dict[str, torch.Tensor]:
        """mask, bias, alibi_slopes, sinks and offsets, as far as the case has them."""
        case, found = self.case, dict(self.offsets)
        if case.mask is not None:
            found["mask"] = self._uniform(case.mask) > 0.25
            if case.blind_rows and case.mask[-2:-1] == "q":
                found["mask"][..., 3::5, :] = False
        if case.bias is not None:
            bias = self._normal(self._shape(case.bias), case.bias_dtype)
            found["bias"] = bias.masked_fill(self._uniform(case.bias) < 0.05, -torch.inf)
        if case.alibi is not None:
            found["alibi_slopes"] = (self._uniform(case.alibi) / 2).to(_dtype(case.dtype))
        if case.sinks:
            found["sinks"] = self._normal((case.heads_q,))
            found["sinks"][1:][-1:] = -torch.inf
        return found

    def _shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in letters)

    def _uniform(self, letters: str) -> torch.Tensor:
        return torch.rand(self._shape(letters), generator=self.generator)

    def _normal(self, shape: tuple[int, ...], dtype: str | None = None) -> torch.Tensor:
        wide = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return wide.to(_dtype(dtype or self.case.dtype))


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def _offsets(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


def _as_called(case: Case, t: torch.Tensor) -> torch.Tensor:
    """A canonical q, k, v, dout or dlse in the case's layout and rank."""
    if case.lens_q is not None:
        return t
    if case.rank == 2:
        return t[0, 0]
    if case.layout == "blhd" and t.dim() == 4:
        t = t.transpose(1, 2).contiguous()
    return t[0] if case.rank == 3 else t


def _poison(
    case: Case,
    spec: AttentionSpec,
    rows: dict[str, torch.Tensor],
    optional: dict[str, torch.Tensor],
) -> None:
    """NaN and Inf, in place, where no visible pair has a part in them."""
    problem = resolve_tensors(spec, {name: rows[name] for name in "qkv"} | optional)
    given = {name: t for name, t in optional.items() if not name.startswith("cu_")}
    x = Inputs(q=rows["q"], k=rows["k"], v=rows["v"], **given)
    seen_q = torch.zeros(x.q.shape[:-1], dtype=torch.bool)
    seen_k = torch.zeros(x.k.shape[:-1], dtype=torch.bool)
    reads = torch.zeros(optional["bias"].shape) if "bias" in optional else None
    for part in parts(problem):
        shape = (len(part.batch), problem.heads_q, part.len_q, part.len_k)
        visible = visible_pairs(problem, part, x).expand(shape)
        part.of_q(seen_q).copy_(visible.any(-1))
        shared = visible.any(-2).reshape(shape[0], problem.heads_kv, problem.group, shape[3])
        part.of_k(seen_k).copy_(shared.any(2))
        if reads is not None:
            read = visible_pairs(problem, part, dataclasses.replace(x, bias=None)).expand(shape)
            target = part.of_pairs(reads)
            target += read.float().sum_to_size(target.shape)
    if reads is not None:
        optional["bias"][reads == 0] = torch.nan
    x.q[~seen_q] = torch.inf
    x.k[~seen_k] = torch.nan
    x.v[~seen_k] = torch.inf
    rows["dout"][~seen_q] = torch.nan
    ignored = ~seen_q
    if case.sinks:  # the sink takes the dlse of a row that sees nothing else
        for part in parts(problem):
            part.of_q(ignored).logical_and_(optional["sinks"][:, None] == -torch.inf)
    rows["dlse"][ignored] = torch.nan


def resolve_tensors(spec: AttentionSpec, tensors: Mapping[str, torch.Tensor]) -> Problem:
    """The Problem of tensors by name, offsets included."""
    headers = {
        name: TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    }
    problem = resolve(spec, headers)
    if not problem.packed:
        return problem
    return problem.with_offsets(tensors["cu_seqlens_q"].tolist(), tensors["cu_seqlens_k"].tolist())

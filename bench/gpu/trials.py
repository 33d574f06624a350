"""A pass launched with a configuration of choice, on tensors of usual shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from flashwire_kernels.fused import backend, config
from flashwire_kernels.fused.call import Call
from flashwire_kernels.fused.candidates import candidates
from flashwire_kernels.fused.config import PASSES, Config, Key
from flashwire_kernels.tensors import Inputs, Wanted
from flashwire_kernels.testing import resolve_tensors
from flashwire_kernels.types import AttentionSpec
from gpu.place import Place

_KERNELS = {
    "forward": ("forward_kernel",),
    "decode": ("decode_kernel", "merge_kernel"),
    "keys": ("keys_kernel",),
    "queries": ("delta_kernel", "queries_kernel"),
}
"""What is timed of a pass."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32}

Results = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """q is (batch, heads, queries, dim), k and v (batch, heads / group, keys, dim).

    bias  a bias (1, heads, queries, keys) is added
    """

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    group: int = 1
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def keys(arch: str, options: dict[str, Any]) -> list[Key]:
    """What may be tuned on a device, as far as `options` want it, the most used first."""
    grid = itertools.product((2, 4), (False, True), (128, 64, 256), PASSES)
    return [
        Key(kind, config.family(arch), item_size, dim, modified)
        for item_size, modified, dim, kind in grid
        if kind in options["passes"]
        and dim in options["dims"]
        and item_size in options["item_sizes"]
        and modified in options["modified"]
    ]


def tried(key: Key, most: int | None) -> list[Config]:
    """The candidates, the shipped one first; `most` of them."""
    return candidates(*key)[:most]


def shapes(key: Key, small: bool) -> list[Shape]:
    """What a configuration is judged by."""
    if key.kind == "decode":
        return _decode_shapes(key.modified, small)
    length, heads = (70, 1) if small else (4096 if key.item_size == 2 else 1024, 16)
    square = partial(Shape, batch=1 if small else 4, heads=heads, queries=length, keys=length)
    causal = {"causal": True}
    if not key.modified:
        return [square("dense"), square("causal", options=causal)]
    return [
        square("causal, softcap", options=causal | {"softcap": 30.0}),
        square("causal, dropout", options=causal | {"dropout_p": 0.1, "dropout_seed": 1}),
        square("bias", bias=True),
    ]


def _decode_shapes(modified: bool, small: bool) -> list[Shape]:
    options = {"softcap": 30.0} if modified else {}
    if small:
        return [Shape("batch 1", 1, 2, 1, 1100, group=2, options=options)]
    return [
        Shape("batch 16", 16, 64, 1, 16384, group=8, options=options),
        Shape("batch 1", 1, 64, 1, 65536, group=8, options=options),
    ]


class Trial:
    """A pass on tensors of a shape, to be launched with one configuration or another."""

    def __init__(self, key: Key, shape: Shape, place: Place) -> None:
        self.key = key
        generator = torch.Generator(place.device).manual_seed(0)
        make = partial(
            torch.randn, dtype=_DTYPES[key.item_size], device=place.device, generator=generator
        )
        rows_q = (shape.batch, shape.heads, shape.queries, key.dim)
        rows_k = (shape.batch, shape.heads // shape.group, shape.keys, key.dim)
        tensors = {"q": make(rows_q), "k": make(rows_k), "v": make(rows_k)}
        if shape.bias:
            tensors["bias"] = make((1, shape.heads, shape.queries, shape.keys))
        self._problem = resolve_tensors(AttentionSpec(**shape.options), tensors)
        self._x = Inputs(**tensors)
        self._dout = make(rows_q)
        self._saved = backend.forward(self._problem, self._x)

    def prepare(self, chosen: Config) -> tuple[list[Call], Results]:
        """What to launch, and where it writes."""
        with configured(self.key, chosen), _recorded() as calls:
            if self.key.kind in ("forward", "decode"):
                results = dict(
                    zip(("out", "lse"), backend.forward(self._problem, self._x), strict=True)
                )
            else:
                results = self._backward()
        if self.key.kind == "keys":
            calls[0].launch()  # delta, which they read
        return [c for c in calls if c.kernel.__name__ in _KERNELS[self.key.kind]], results

    def _backward(self) -> Results:
        found = backend.backward(self._problem, self._x, *self._saved, self._dout, None, Wanted())
        names = ("dq",) if self.key.kind == "queries" else ("dk", "dv")
        return {name: getattr(found, name) for name in names}


def launch(calls: list[Call]) -> None:
    """One after the other."""
    for call in calls:
        call.launch()


@contextmanager
def configured(key: Key, chosen: Config) -> Iterator[None]:
    """The pass of `key` runs with `chosen`, others as shipped."""
    choose = config.choose

    def chosen_for(kind: config.Pass, *rest: Any, **modified: Any) -> Config:
        return chosen if kind == key.kind else choose(kind, *rest, **modified)

    with mock.patch.object(config, "choose", chosen_for):
        yield


@contextmanager
def _recorded() -> Iterator[list[Call]]:
    """Launches are collected in place of being made."""
    calls: list[Call] = []
    with mock.patch.object(Call, "launch", lambda call: calls.append(call)):
        yield calls

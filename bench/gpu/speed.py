"""TFLOP/s of forward and backward at a constant number of tokens, beside PyTorch's own kernels.

Counted as is usual: 4 B H L^2 D operations forward, half of it if causal; 2.5 times that backward.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flashwire_kernels import api
from flashwire_kernels.types import AttentionSpec
from gpu.items import MINE, PASS, PEERS, Item, Row
from gpu.place import Place, Run, interleaved, ratio
from gpu.results import BACKEND

FLEX_LENGTHS = (1024, 4096, 16384)
"""Each length is a compilation of its own."""

_LENGTHS = (16384, 4096, 1024, 8192, 2048, 512)  # what matters most comes first
_DIMS = (128, 64, 256)
_WORK = 0.6  # part of a row's time that is spent on rounds

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """q, k and v are bfloat16, (tokens / length, hidden / dim, length, dim)."""

    dim: int
    causal: bool
    length: int
    tokens: int = 16384
    hidden: int = 2048

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tokens // self.length, self.hidden // self.dim, self.length, self.dim

    def flops(self, *, backward: bool) -> float:
        """Operations, as they are usually counted."""
        batch, heads, length, dim = self.sizes
        forward = 4.0 * batch * heads * length * length * dim / (2 if self.causal else 1)
        return forward * (2.5 if backward else 1)

    def __str__(self) -> str:
        return f"d{self.dim} L{self.length} {'causal' if self.causal else 'dense'}"


def shapes(small: bool) -> list[Shape]:
    """All that are measured, the most telling first."""
    if small:
        return [Shape(64, False, 64, 64, 256), Shape(256, True, 64, 64, 256)]
    grid = itertools.product(_LENGTHS, _DIMS, (False, True))
    return [Shape(dim, causal, length) for length, dim, causal in grid]


def items(place: Place, options: dict[str, Any]) -> list[Item]:
    """A row per shape; options["seconds"] are for all of them."""
    found = shapes(place.dry)
    seconds = options["seconds"] * _WORK / len(found)
    return [Item(str(shape), partial(_row, shape, seconds)) for shape in found]


def warm(shape: Shape, name: str, place: Place) -> Row:
    """Run one of them once, so that it is compiled, and kept where compiled kernels are."""
    for run in _runs(shape, name, place):
        run()
    return {"status": PASS}


def _row(shape: Shape, seconds: float, place: Place) -> Row:
    passes: dict[str, dict[str, Run]] = {"forward": {}, "backward": {}}
    absent: dict[str, str] = {}
    for name in (MINE, *PEERS):
        if name == "flex" and not place.dry and shape.length not in FLEX_LENGTHS:
            continue
        try:
            runs = dict(zip(passes, _runs(shape, name, place), strict=True))
            for run in runs.values():
                run()
            place.synchronise()
        except Exception as raised:
            if name == MINE:
                raise
            absent[name] = f"{type(raised).__name__}: {raised}".partition("\n")[0][:300]
            continue
        for kind, run in runs.items():
            passes[kind][name] = run
    collect = place.start_reading()
    found = {kind: _measured(place, runs, seconds / 2) for kind, runs in passes.items()}
    for kind, figures in found.items():
        flops = shape.flops(backward=kind == "backward")
        figures["tflops"] = {name: flops / ms / 1e9 for name, ms in figures["ms"].items()}
    described = {"dim": shape.dim, "causal": shape.causal, "length": shape.length}
    return described | found | {"absent": absent, "readings": collect(), "status": PASS}


def _measured(place: Place, runs: dict[str, Run], seconds: float) -> dict[str, Any]:
    times = interleaved(place, runs, seconds)
    return {
        "ms": {name: statistics.median(t) for name, t in times.items()},
        "ratio": {name: ratio(times[MINE], t) for name, t in times.items() if name != MINE},
        "rounds": len(times[MINE]),
    }


def _runs(shape: Shape, name: str, place: Place) -> tuple[Run, Run]:
    """Forward, and backward alone."""
    make = partial(torch.randn, shape.sizes, dtype=torch.bfloat16, device=place.device)
    q, k, v, dout = make(), make(), make(), make()
    if name == MINE:
        spec = AttentionSpec(causal=shape.causal)
        f = api.forward(q, k, v, spec=spec, backend=BACKEND)
        return (
            partial(api.forward, q, k, v, spec=spec, backend=BACKEND),
            partial(api.backward, dout, q, k, v, out=f.out, lse=f.lse, spec=spec, backend=BACKEND),
        )
    attention = _peer(name, shape, place)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves)

    def forward() -> object:
        with torch.no_grad():
            return attention(q, k, v)

    return forward, partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)


def _peer(name: str, shape: Shape, place: Place) -> Attention:
    if name != "flex":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        return partial(_sdpa, backends[name], shape.causal)
    attention: Any = flex_attention
    if not place.dry:
        torch.compiler.reset()  # else, after a few shapes, flex_attention would not be compiled
        attention = torch.compile(flex_attention, dynamic=False)
    mask = None
    if shape.causal:
        length = shape.length
        mask = create_block_mask(_sees, None, None, length, length, device=str(place.device))
    return partial(attention, block_mask=mask)


def _sdpa(
    backend: SDPBackend, causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _sees(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return i >= j

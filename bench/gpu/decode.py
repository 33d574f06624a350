"""Decoding: a query per sequence over a cache of keys and values, which must be read once.

Bytes are those of q, k, v and out. The device's rate is that of a copy, in the same rounds.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashwire_kernels import api
from gpu.items import MINE, PASS, SKIPPED, Item, Row
from gpu.place import Place, Run, interleaved, ratio
from gpu.results import BACKEND

_WORK = 0.5  # part of a row's time that is spent on rounds


@dataclass(frozen=True, slots=True)
class Shape:
    """q (batch, 8 heads_kv, 1, dim); k and v (batch, heads_kv, length, dim), bfloat16."""

    batch: int
    length: int
    heads_kv: int = 8
    group: int = 8
    dim: int = 128

    @property
    def nbytes(self) -> int:
        """Of k and v, q and out."""
        rows = self.batch * self.heads_kv
        return 2 * self.dim * 2 * rows * (self.length + self.group)

    def __str__(self) -> str:
        return f"batch {self.batch} keys {self.length}"


def shapes(small: bool) -> list[Shape]:
    """All that are measured, the most telling first."""
    if small:
        return [Shape(1, 96, 1, 2, 64), Shape(2, 96, 1, 2, 64)]
    lengths, batches = (16384, 4096, 65536), (64, 16, 4, 1)
    return [Shape(batch, length) for length, batch in itertools.product(lengths, batches)]


def items(place: Place, options: dict[str, Any]) -> list[Item]:
    """A row per shape; options["seconds"] are for all of them."""
    found = shapes(place.dry)
    seconds = options["seconds"] * _WORK / len(found)
    return [Item(str(shape), partial(_row, shape, seconds)) for shape in found]


def warm(shape: Shape, place: Place) -> Row:
    """Run once, so that it is compiled."""
    _runs(shape, place)[MINE]()
    return {"status": PASS}


def _row(shape: Shape, seconds: float, place: Place) -> Row:
    copied = (1 << 20) if place.dry else (1 << 30)
    if 1.2 * (shape.nbytes + 2 * copied) > place.free_bytes():
        return {"status": SKIPPED, "why": "not enough memory"}
    runs = _runs(shape, place)
    source = torch.zeros(copied, dtype=torch.int8, device=place.device)
    target = torch.empty_like(source)
    runs["copy"] = partial(target.copy_, source)
    absent = {}
    try:
        runs["flash"]()
        place.synchronise()
    except Exception as raised:
        absent["flash"] = f"{type(raised).__name__}: {raised}".partition("\n")[0][:300]
        del runs["flash"]
    collect = place.start_reading()
    times = interleaved(place, runs, seconds)
    # Read and written, in the copy; the median of pairs, as for every ratio.
    of_copy = ratio(times[MINE], times["copy"]) * shape.nbytes / (2 * copied)
    ms = {name: statistics.median(t) for name, t in times.items()}
    return {
        "batch": shape.batch,
        "length": shape.length,
        "ms": ms,
        "gb_per_s": shape.nbytes / ms[MINE] / 1e6,
        "copy_gb_per_s": 2 * copied / ms["copy"] / 1e6,
        "of_copy": of_copy,
        "ratio": {n: ratio(times[MINE], t) for n, t in times.items() if n == "flash"},
        "rounds": len(times[MINE]),
        "absent": absent,
        "readings": collect(),
        "status": PASS,
    }


def _runs(shape: Shape, place: Place) -> dict[str, Run]:
    make = partial(torch.randn, dtype=torch.bfloat16, device=place.device)
    q = make((shape.batch, shape.heads_kv * shape.group, 1, shape.dim))
    k, v = (make((shape.batch, shape.heads_kv, shape.length, shape.dim)) for _ in range(2))

    def flash() -> object:
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return {MINE: partial(api.forward, q, k, v, backend=BACKEND), "flash": flash}

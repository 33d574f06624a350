"""Rooflines of the kernels: what data sheets allow, for usual shapes. Nothing here is measured.

    python bench/roofline.py [--write]

Prints the tables of docs/performance.md; --write puts them there, between their markers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from auditing.bounds import CARDS, Card, bound

DOC = Path(__file__).resolve().parents[1] / "docs" / "performance.md"

_SPLIT = 512  # keys of a decoding program
_WIDTH = 2  # bytes of a bfloat16
_PER_SCORE = {"sm_80": 10, "sm_90": 8, "sm_100": 8}
"""Instructions beside matrix ones that the audit allows the forward, for each score."""


@dataclass(frozen=True, slots=True)
class Device:
    """A card with its memory, whose rate is in TB/s, by NVIDIA's data sheets of A100 80GB (2021),
    H100 (2022), H200 (2023) and DGX B200 (2024: 64 TB/s for eight).
    """

    name: str
    family: str
    memory: float

    @property
    def card(self) -> Card:
        return CARDS[self.family]

    @property
    def tensor(self) -> float:
        """TFLOP/s, dense, 16-bit."""
        return self._rate(self.card.tensor)

    @property
    def exponentials(self) -> float:
        """10^12 a second."""
        return self._rate(self.card.exponential)

    def _rate(self, per_clock: float) -> float:
        return self.card.processors * self.card.gigahertz * per_clock / 1e3


DEVICES = (
    Device("A100", "sm_80", 2.039),
    Device("H100", "sm_90", 3.35),
    Device("H200", "sm_90", 4.8),
    Device("B200", "sm_100", 8.0),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """q (batch, heads, queries, dim), k and v (batch, heads_kv, keys, dim), bfloat16."""

    batch: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    dim: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Visible ones, over all heads; square where causal."""
        each = self.queries * self.keys
        if self.causal:
            each = self.queries * (self.queries + 1) // 2
        return self.batch * self.heads * each

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        length = f"L{self.keys}" if self.queries == self.keys else f"1 query, {self.keys} keys"
        return f"d{self.dim}, B{self.batch}, H{heads}, {length}{', causal' if self.causal else ''}"


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel must at least do: operations, exponentials, bytes."""

    flops: float
    exponentials: float
    nbytes: float

    def least(self, device: Device) -> tuple[float, str]:
        """Microseconds, and what takes them."""
        times = {
            "tensor": self.flops / device.tensor,
            "exp": self.exponentials / device.exponentials,
            "memory": self.nbytes / device.memory,
        }
        longest = max(times, key=lambda name: times[name])
        return times[longest] / 1e6, longest


def forward(s: Shape) -> Work:
    q, k = _rows(s)
    return Work(4 * s.pairs * s.dim, s.pairs, q * (2 * s.dim * _WIDTH + 4) + k * 2 * s.dim * _WIDTH)


def infinite(s: Shape) -> Work:
    """With the running sum, which PyTorch takes."""
    _, k = _rows(s)
    return Work(0, 0, k * (s.dim * _WIDTH + 4 + 8))


def delta(s: Shape) -> Work:
    q, _ = _rows(s)
    return Work(2 * q * s.dim, 0, q * (2 * s.dim * _WIDTH + 8))


def keys(s: Shape) -> Work:
    q, k = _rows(s)
    nbytes = q * (2 * s.dim * _WIDTH + 8) + k * 4 * s.dim * _WIDTH
    return Work(8 * s.pairs * s.dim, s.pairs, nbytes)


def queries(s: Shape) -> Work:
    q, k = _rows(s)
    nbytes = q * (3 * s.dim * _WIDTH + 8) + k * 2 * s.dim * _WIDTH
    return Work(6 * s.pairs * s.dim, s.pairs, nbytes)


def dbias(s: Shape) -> Work:
    """Of a bias (heads, queries, keys), which is read, and its gradient written."""
    q, k = _rows(s)
    entries = s.heads * s.queries * s.keys
    nbytes = q * (2 * s.dim * _WIDTH + 8) + k * 2 * s.dim * _WIDTH + entries * 2 * _WIDTH
    return Work(4 * s.pairs * s.dim, s.pairs, nbytes)


def decode(s: Shape) -> Work:
    q, k = _rows(s)
    parts = q * -(-s.keys // _SPLIT)
    nbytes = q * s.dim * _WIDTH + k * 2 * s.dim * _WIDTH + parts * (s.dim + 1) * 4
    return Work(4 * s.pairs * s.dim, s.pairs, nbytes)


def merge(s: Shape) -> Work:
    q, _ = _rows(s)
    parts = q * -(-s.keys // _SPLIT)
    return Work(2 * parts * s.dim, 2 * parts, parts * (s.dim + 1) * 4 + q * (s.dim * _WIDTH + 4))


def _rows(s: Shape) -> tuple[int, int]:
    """Of queries, and of keys."""
    return s.batch * s.heads * s.queries, s.batch * s.heads_kv * s.keys


_SELF = (infinite, forward, delta, keys, queries)
SHAPES: tuple[tuple[Shape, tuple[Callable[[Shape], Work], ...]], ...] = (
    (Shape(1, 16, 16, 16384, 16384, 128, True), _SELF),
    (Shape(4, 16, 16, 4096, 4096, 128, False), (*_SELF, dbias)),
    (Shape(4, 32, 32, 4096, 4096, 64, True), _SELF),
    (Shape(16, 64, 8, 1, 16384, 128, False), (decode, merge)),
)


def devices() -> Iterator[str]:
    """The table of what the data sheets say."""
    yield "| | " + " | ".join(d.name for d in DEVICES) + " |"
    yield "|---|" + "---:|" * len(DEVICES)
    rows: dict[str, Callable[[Device], str]] = {
        "dense bf16, TFLOP/s": lambda d: f"{d.tensor:.0f}",
        "memory, TB/s": lambda d: f"{d.memory:.2f}",
        "ridge, FLOP per byte": lambda d: f"{d.tensor / d.memory:.0f}",
        "exponentials, 10^12 per second": lambda d: f"{d.exponentials:.2f}",
        "FLOP per exponential that take as long": lambda d: f"{d.tensor / d.exponentials:.0f}",
    }
    for name, of in rows.items():
        yield f"| {name} | " + " | ".join(of(d) for d in DEVICES) + " |"


def kernels() -> Iterator[str]:
    """The table of what each kernel needs at least."""
    yield "| kernel | GFLOP | MB | FLOP/B | " + " | ".join(f"{d.name}, us" for d in DEVICES) + " |"
    yield "|---|---:|---:|---:|" + "---:|" * len(DEVICES)
    for shape, launched in SHAPES:
        yield f"| **{shape}** |" + " |" * (3 + len(DEVICES))
        for kernel in launched:
            work = kernel(shape)
            least = [work.least(d) for d in DEVICES]
            cells = [f"{us:.1f} {what}" for us, what in least]
            intensity = work.flops / work.nbytes
            yield (
                f"| {kernel.__name__} | {work.flops / 1e9:.1f} | {work.nbytes / 1e6:.1f} | "
                f"{intensity:.0f} | " + " | ".join(cells) + " |"
            )


def tiles() -> Iterator[str]:
    """The table of rates between a tile's bounds."""
    families = dict.fromkeys(d.family for d in DEVICES)
    names = ["/".join(d.name for d in DEVICES if d.family == f) for f in families]
    yield "| TFLOP/s | " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * len(names)
    for dim in (64, 128):
        rates = {
            name: [_between(family, n, dim) for family in families]
            for name, n in (("forward", 2), ("keys", 4), ("queries", 3))
        }
        # As is usual, 5 products count, of the 7 that the two kernels take.
        both = zip(rates["keys"], rates["queries"], strict=True)
        rates["backward"] = [
            (5 / (4 / k[0] + 3 / q[0]), 5 / (4 / k[1] + 3 / q[1])) for k, q in both
        ]
        for name, found in rates.items():
            cells = [f"{low:.0f} to {high:.0f}" for low, high in found]
            yield f"| {name}, d{dim} | " + " | ".join(cells) + " |"


def _between(family: str, products: int, dim: int) -> tuple[float, float]:
    """TFLOP/s if nothing of a tile overlaps, and if everything does: so many products of `dim`, an
    exponential and, beside them, as many instructions as the audit allows the forward.
    """
    card, scores = CARDS[family], 128 * 128
    instructions = _PER_SCORE[family] * scores / card.lanes
    found = bound(card, 2.0 * products * scores * dim, card.tensor, scores, instructions)
    return found.serial, found.parallel


TABLES = {"devices": devices, "kernels": kernels, "tiles": tiles}


def written(text: str) -> str:
    """The document with the tables as they are now. Raises KeyError where a marker is missing."""
    for name, table in TABLES.items():
        begin, end = f"<!-- roofline {name} -->\n", "<!-- end -->"
        if begin not in text:
            raise KeyError(begin)
        found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        new = begin + "\n".join(table()) + "\n" + end
        text = found.sub(lambda _, new=new: new, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    if parser.parse_args().write:
        DOC.write_text(written(DOC.read_text()))
    else:
        print("\n\n".join("\n".join(table()) for table in TABLES.values()))


if __name__ == "__main__":
    main()

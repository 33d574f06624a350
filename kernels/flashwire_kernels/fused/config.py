"""Launch configurations: which tile sizes, warps and pipeline stages a kernel runs with.

shipped/<pass>.toml holds a line for each architecture, width of a number, head dimension and
whether scores are modified. What ahead-of-time compilation shows (bench/audit.py) chooses them,
until a GPU has measured them (bench/tune.py).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

Pass = Literal["forward", "keys", "queries", "decode"]
PASSES: tuple[Pass, ...] = ("forward", "keys", "queries", "decode")

SHARED_BYTES = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
    "sm_120": 99 << 10, "gfx942": 64 << 10,
}  # fmt: skip
"""The families that configurations are shipped for, and the shared memory that a block may use
(CUDA C++ Programming Guide, compute capabilities; AMD CDNA 3 ISA, local data share).
"""

MAX_DECODE_ROWS = 64
"""Queries times the heads that share keys, up to which the keys are split."""

COUNT_FROM = 2048
"""Queries per key from which counting infinite keys costs less than watching for them."""

_WIDTHS = {2: "half", 4: "single"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """m queries by n keys, computed by `warps` warps with loads `stages` ahead.

    split        of a decode, how many keys a program takes; m is the number of rows there are
    descriptors  whole tiles come by tensor descriptors (TMA) where the layout allows it
    edge         of a forward, keys at a time in tiles that some rows do not see whole; 0 is n
    width        of a forward, columns of the head dimension at a time; 0 is all
    floats       look out for infinite products as floats, where a GPU finds the least of three
    watching     of a forward, what to run with while it looks out for infinite products; None is
                 the same
    apart        dk and dv have a launch each, where both do not fit into registers at once
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 2
    split: int = 0
    descriptors: bool = False
    edge: int = 0
    width: int = 0
    floats: bool = False
    watching: Config | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        for name in ("m", "n"):
            size = getattr(self, name)
            if size < 16 or size > 256 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two from 16 to 256, got {size}")
        for name in ("edge", "width"):
            size = getattr(self, name)
            if size and (size < 16 or size & (size - 1)):
                raise ValueError(f"{name} must be 0 or a power of two from 16 on, got {size}")
        if self.edge > self.n:
            raise ValueError(f"edge must be at most n ({self.n}), got {self.edge}")
        if self.split % self.n:
            raise ValueError(f"split must be a multiple of n ({self.n}), got {self.split}")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps must be 1, 2, 4, 8 or 16, got {self.warps}")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must be from 1 to 8, got {self.stages}")

    @property
    def options(self) -> dict[str, int]:
        """As Triton calls them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


class Key(NamedTuple):
    """What a shipped configuration is for.

    family is one of SHARED_BYTES; item_size 2 or 4 bytes; dim the largest padded head dimension it
    serves, of q and v; modified: masks, bias, softcap, ALiBi, dropout, or rows that cannot be
    loaded in vectors, need registers beside the products.
    """

    kind: Pass
    family: str
    item_size: int
    dim: int
    modified: bool


_INTERPRETED = Config(m=64, n=64, descriptors=True)
_INTERPRETED_FORWARD = Config(m=64, n=64, descriptors=True, edge=32, width=64)
_INTERPRETED_DECODE = Config(m=64, n=32, split=64)


def choose(kind: Pass, arch: str, item_size: int, dim: int, *, modified: bool) -> Config:
    """The configuration of a pass; arch is "sm_90", "gfx942", or "interpreter"."""
    if arch == "interpreter":
        return {"forward": _INTERPRETED_FORWARD, "decode": _INTERPRETED_DECODE}.get(
            kind, _INTERPRETED
        )
    served = min(d for d in _dims(kind) if d >= dim)
    return shipped(kind)[Key(kind, family(arch), item_size, served, modified)]


def family(arch: str) -> str:
    """The family whose configurations an architecture runs with."""
    if arch in SHARED_BYTES:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    major = int(arch.removeprefix("sm_")) // 10
    return {9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_120"}.get(major, "sm_86")


@functools.cache
def shipped(kind: Pass) -> dict[Key, Config]:
    """Every shipped configuration of a pass. Raises ValueError for one that cannot be."""
    text = (files(__package__) / "shipped" / f"{kind}.toml").read_text()
    found = {}
    for family_name, widths in tomllib.loads(text).items():
        for item_size, width in _WIDTHS.items():
            for name, fields in widths[width].items():
                dim, _, modified = name.removeprefix("d").partition("_")
                key = Key(kind, family_name, item_size, int(dim), bool(modified))
                found[key] = configured(fields)
    return found


@functools.cache
def decode_splits() -> tuple[int, ...]:
    """How many keys a program of a decode may take, by any configuration."""
    configs = (_INTERPRETED_DECODE, *shipped("decode").values())
    return tuple(sorted({config.split for config in configs}))


def configured(fields: Mapping[str, Any]) -> Config:
    """A configuration from its fields, as TOML or JSON has them."""
    watching = fields.get("watching")
    return Config(**{**fields, "watching": watching and configured(watching)})


@functools.cache
def _dims(kind: Pass) -> frozenset[int]:
    return frozenset(key.dim for key in shipped(kind))

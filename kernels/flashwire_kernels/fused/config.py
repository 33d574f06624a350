"""Launch configurations: which tile sizes, warps and pipeline stages a kernel runs with.

The table holds what ahead-of-time compilation shows to be without spills (bench/audit.py); a GPU
has not measured it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "keys", "queries", "decode"]
PASSES: tuple[Pass, ...] = ("forward", "keys", "queries", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """m queries by n keys, computed by `warps` warps with loads `stages` ahead.

    split        of a decode, how many keys a program takes; m is the number of rows there are
    descriptors  whole tiles of keys come by tensor descriptors (TMA) where the layout allows it
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 2
    split: int = 0
    descriptors: bool = False

    def __post_init__(self) -> None:
        for name in ("m", "n"):
            size = getattr(self, name)
            if size < 16 or size > 256 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two from 16 to 256, got {size}")
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


MAX_DECODE_ROWS = 64
"""Queries times the heads that share keys, up to which the keys are split."""

_INTERPRETED = Config(m=64, n=64, descriptors=True)
_INTERPRETED_DECODE = Config(m=64, n=32, split=64)


def choose(kind: Pass, arch: str, item_size: int, dim: int, *, modified: bool) -> Config:
    """The configuration of a pass.

    arch is "sm_90", "gfx942", or "interpreter"; dim the padded head dimension, the larger of q's
    and v's; modified: masks, bias, softcap, ALiBi or dropout need registers beside the products.
    """
    if arch == "interpreter":
        return _INTERPRETED_DECODE if kind == "decode" else _INTERPRETED
    if item_size == 4:
        return _WIDE[kind][dim]
    family = _family(arch)
    config = _TABLE[family, kind][dim]
    return _MODIFIED[kind][dim] if modified else config


def _family(arch: str) -> str:
    if arch.startswith("gfx"):
        return "gfx"
    return arch if arch in ("sm_90", "sm_100") else "sm_80"


def _by_dim(at_64: Config, at_128: Config, at_256: Config) -> dict[int, Config]:
    return {16: at_64, 32: at_64, 64: at_64, 128: at_128, 256: at_256}


_WIDE: dict[Pass, dict[int, Config]] = {
    "forward": _by_dim(
        Config(m=64, n=64), Config(m=64, n=32, warps=8), Config(m=32, n=32, warps=8, stages=1)
    ),
    "keys": _by_dim(
        Config(m=32, n=64, warps=8),
        Config(m=32, n=32, warps=8, stages=1),
        Config(m=16, n=32, warps=8, stages=1),
    ),
    "queries": _by_dim(
        Config(m=64, n=32, warps=8),
        Config(m=32, n=32, warps=8, stages=1),
        Config(m=32, n=16, warps=8, stages=1),
    ),
    "decode": _by_dim(
        Config(m=64, n=64, split=512),
        Config(m=64, n=32, split=512),
        Config(m=64, n=32, split=512, stages=1),
    ),
}
_MODIFIED: dict[Pass, dict[int, Config]] = {
    "forward": _by_dim(
        Config(m=64, n=64), Config(m=64, n=64), Config(m=64, n=32, warps=8, stages=1)
    ),
    "keys": _by_dim(
        Config(m=64, n=64), Config(m=32, n=64, warps=8), Config(m=32, n=32, warps=8, stages=1)
    ),
    "queries": _by_dim(
        Config(m=64, n=64), Config(m=64, n=32, warps=8), Config(m=32, n=32, warps=8, stages=1)
    ),
    "decode": _by_dim(
        Config(m=64, n=128, split=512, stages=3),
        Config(m=64, n=64, split=512, stages=3),
        Config(m=64, n=32, split=512),
    ),
}
_FORWARD_90 = _by_dim(
    Config(m=128, n=128, warps=8, descriptors=True),
    Config(m=128, n=128, warps=8, descriptors=True),
    Config(m=128, n=64, warps=8, descriptors=True),
)
_TABLE: dict[tuple[str, Pass], dict[int, Config]] = {
    (family, kind): _MODIFIED[kind]
    for family in ("sm_80", "sm_90", "sm_100", "gfx")
    for kind in PASSES
}
_TABLE["sm_80", "forward"] = _by_dim(
    Config(m=128, n=64, warps=8, stages=3),
    Config(m=128, n=64, warps=8),
    Config(m=64, n=32, warps=8),
)
for _family_90 in ("sm_90", "sm_100"):
    _TABLE[_family_90, "forward"] = _FORWARD_90
    _TABLE[_family_90, "keys"] = _by_dim(
        Config(m=64, n=128, warps=8),
        Config(m=32, n=128, warps=8),
        Config(m=32, n=32, warps=8, stages=1),
    )
    _TABLE[_family_90, "queries"] = _by_dim(
        Config(m=128, n=128, warps=8),
        Config(m=128, n=64, warps=8),
        Config(m=128, n=32, warps=8),
    )

"""What the clocks of a card allow: a tile's least time, and the rate that follows.

tensor       multiplications and additions, each counted, of 16-bit products in a clock of a
             multiprocessor (SM, CU); of TF32 products half as many
exponential  in a clock of a multiprocessor
issue        instructions of a warp (wavefront) in a clock of a multiprocessor
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its data sheet; tensor is the dense 16-bit rate with float32 sums over SMs and
    clock.
    """

    name: str
    processors: int
    gigahertz: float
    tensor: int
    fp32: int
    exponential: int = 16
    issue: float = 4.0
    lanes: int = 32


CARDS = {
    "sm_80": Card("A100 SXM", 108, 1.41, 2048, 128),
    "sm_86": Card("A10", 72, 1.695, 1024, 256),
    "sm_89": Card("L40S", 142, 2.52, 1024, 256),
    "sm_90": Card("H100 SXM", 132, 1.83, 4096, 256),
    "sm_100": Card("B200", 148, 1.85, 8192, 256),
    "sm_120": Card("RTX 5090", 170, 2.41, 512, 256),
    "gfx942": Card("MI300X", 304, 2.1, 2048, 256, issue=1.0, lanes=64),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """Clocks of a multiprocessor for one tile, and TFLOP/s of the card: `serial` if nothing runs
    beside anything else, `parallel` if everything does.
    """

    tensor: float
    exponential: float
    issue: float
    serial: float
    parallel: float


def bound(card: Card, flops: float, rate: float, exponentials: float, instructions: float) -> Bound:
    """flops, exponentials (of all threads) and instructions (of all warps) of a tile; rate is the
    flops in a clock of a multiprocessor.
    """
    clocks = flops / rate, exponentials / card.exponential, instructions / card.issue
    whole = flops * card.processors * card.gigahertz / 1000
    return Bound(*clocks, whole / sum(clocks), whole / max(clocks))

"""What the clocks of a card allow a tile, and the rate that follows.

Nothing here was measured: the rates are the makers' own, and a kernel also waits for memory, for
barriers and for what it has just computed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its data sheet. Rates are per clock of one multiprocessor (SM; CU at AMD).

    processors   multiprocessors
    gigahertz    the clock that the data sheet's rates are for
    tensor       flops of dense 16-bit products with float32 sums; of TF32 ones half as many
    fp32         flops of float32 multiply-adds, by ordinary lanes or, at AMD, matrix cores
    exponential  base-2 exponentials of float32
    issue        instructions of a warp
    lanes        threads of a warp
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
    "sm_80": Card("A100 SXM", 108, 1.41, tensor=2048, fp32=128),
    "sm_86": Card("A10", 72, 1.695, tensor=1024, fp32=256),
    "sm_89": Card("L40S", 142, 2.52, tensor=1024, fp32=256),
    "sm_90": Card("H100 SXM", 132, 1.83, tensor=4096, fp32=256),
    "sm_100": Card("B200", 148, 1.85, tensor=8192, fp32=256),
    "sm_120": Card("RTX 5090", 170, 2.407, tensor=512, fp32=256),
    "gfx942": Card("MI300X", 304, 2.1, tensor=2048, fp32=256, issue=1.0, lanes=64),
}
"""Multiprocessors and boost clocks: NVIDIA's A100 (2020), GA102 and A10 (2021), Ada and L40S
(2023), H100 (2022) and RTX Blackwell (2025) whitepapers and data sheets; AMD's MI300X data sheet
(2023). `tensor` is the data sheet's dense rate over both: 312, 125, 362, 989, 209.5 and 1307
TFLOP/s. An H200 computes as an H100 does. B200: 2250 TFLOP/s, and 8192 flops and 16 exponentials
in a clock (Zadouri et al., FlashAttention-4, 2026); its clock is what follows.
exponential: CUDA C++ Programming Guide, throughput of native arithmetic instructions, 16 for every
compute capability from 8.0 to 12.0; CDNA 3 takes a quarter of its 64 lanes.
issue: four schedulers with an instruction per clock each (the same guide, compute capabilities);
a CU has four SIMDs of 16 lanes, which take four clocks for the 64 threads of an instruction
(AMD CDNA 3 ISA).
"""


@dataclass(frozen=True, slots=True)
class Bound:
    """Clocks of a multiprocessor for a tile; and TFLOP/s of the whole card, `serial` where nothing
    runs beside anything else, `parallel` where everything does.
    """

    tensor: float
    exponential: float
    issue: float
    serial: float
    parallel: float


def bound(card: Card, flops: float, rate: float, exponentials: float, instructions: float) -> Bound:
    """Of a tile of so many flops, exponentials (of all threads) and instructions (of all warps);
    rate is card.tensor, half of it, or card.fp32.
    """
    clocks = flops / rate, exponentials / card.exponential, instructions / card.issue
    peak = flops * card.processors * card.gigahertz / 1000
    return Bound(*clocks, serial=peak / sum(clocks), parallel=peak / max(clocks))

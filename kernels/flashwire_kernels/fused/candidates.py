"""Launch configurations worth timing on a GPU, beside the one that is shipped (see config.py).

A program holds operands of its matrix products in shared memory, and sums and scores in registers.
Both are counted from shapes alone: bench/tune.py leaves out what then does not compile, or spills.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from flashwire_kernels.fused.config import SHARED_BYTES, Config, Key, Pass, shipped

_SIZES = (32, 64, 128)
_WARPS = (4, 8)
_SPLITS = (512, 1024)
_TILES = {"forward": 1, "decode": 1, "keys": 2, "queries": 2}  # q k^T; and dout v^T
_DESCRIBED = ("sm_90", "sm_100", "sm_120")  # have tensor memory accelerators
_OTHER_REGISTERS = 40  # of a thread: pointers, counters, what is kept per row
_LEAST_TILE = 16 * 8  # scores of a warp's smallest matrix instruction
_LEAST_ROWS = 64  # of the matrix instructions that read shared memory while others run


def candidates(kind: Pass, family: str, item_size: int, dim: int, modified: bool) -> list[Config]:
    """What may be the fastest configuration of a pass: the shipped one first, none twice.

    The arguments are those of config.Key.
    """
    first = shipped(kind)[Key(kind, family, item_size, dim, modified)]

    def fits(config: Config) -> bool:
        shared = shared_bytes(kind, family, config, item_size, dim)
        held = registers(kind, family, config, item_size, dim)
        most = registers_of(family, config.warps)
        return shared <= SHARED_BYTES[family] and most // 3 <= held <= most

    found = [first]
    if kind == "forward" and family in _DESCRIBED:
        found.append(dataclasses.replace(first, descriptors=not first.descriptors))
    for tile in _tiles(kind, first):
        rows = tile.n if kind == "keys" else tile.m
        if _asynchronous(family, item_size) and rows < _LEAST_ROWS:
            continue
        ahead = [dataclasses.replace(tile, stages=n) for n in (2, 3, 4)]
        found += [c for c in ahead if fits(c)] or [c for c in (tile,) if fits(c)]
    return list(dict.fromkeys(found))


def shared_bytes(kind: Pass, family: str, config: Config, item_size: int, dim: int) -> int:
    """Operands of a program: what it keeps throughout, what it loads for each step, ahead, and
    p where products are not a tensor core's. Compiled kernels take 2 KiB more at most.
    """
    kept, loaded = (config.n, config.m) if kind == "keys" else (config.m, config.n)
    ahead = config.stages if _asynchronous(family, item_size) else max(1, config.stages - 1)
    rows = _TILES[kind] * kept + ahead * 2 * loaded
    passed_on = _TILES[kind] * config.m * config.n if item_size == 4 else 0
    return (rows * dim + passed_on) * item_size


def registers(kind: Pass, family: str, config: Config, item_size: int, dim: int) -> int:
    """32-bit numbers of a thread: sums over all steps, scores of one, and p as an operand."""
    sums = 2 * config.n if kind == "keys" else config.m
    scores = config.m * config.n
    held = sums * dim + _TILES[kind] * scores + scores * item_size // 4
    return held // (config.warps * _lanes(family)) + _OTHER_REGISTERS


def registers_of(family: str, warps: int) -> int:
    """How many a thread can have: 64 Ki per SM and 255 each (CUDA C++ Programming Guide, compute
    capabilities); 512 a lane of each of a CU's four SIMDs (AMD CDNA 3 ISA).
    """
    if family == "gfx942":
        return 4 * 512 // max(4, warps)
    return min(255, (64 << 10) // (warps * 32))


def _lanes(family: str) -> int:
    return 64 if family == "gfx942" else 32


def _asynchronous(family: str, item_size: int) -> bool:
    """Whether products run while others are loaded and computed (wgmma, tcgen05)."""
    return family in ("sm_90", "sm_100") and item_size == 2


def _tiles(kind: Pass, first: Config) -> Iterator[Config]:
    """Sizes and warps, with nothing loaded ahead; by descriptors where `first` is."""
    rows = (first.m,) if kind == "decode" else _SIZES
    splits = _SPLITS if kind == "decode" else (0,)
    for m, n, warps, split in itertools.product(rows, _SIZES, _WARPS, splits):
        if m * n >= _LEAST_TILE * warps:
            edge = first.edge if first.edge < n else 0
            yield dataclasses.replace(
                first, m=m, n=n, warps=warps, stages=1, split=split, edge=edge
            )

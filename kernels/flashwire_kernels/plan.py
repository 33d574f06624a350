"""What an attention costs, counted before it runs: arithmetic, bytes, tiles. No torch here.

Counting rules
    pairs       visible (query, key) pairs by position, exactly, over all query heads; a mask tensor
                counts as all visible
    forward     2 * pairs * (D + Dv): S = Q K^T and O = P V, two operations a multiply-add
    backward    2 * pairs * (3 D + 2 Dv): S again, dP = dO V^T, dV = P^T dO, dQ = dS K,
                dK = dS^T Q
    traffic     after Dao, Fu, Ermon, Rudra, Re, "FlashAttention" (2022), theorem 2: fast memory
                of M elements, tiles reduce the traffic of the score matrix M / D^2 times
                (here M / (D Dv), the same where D = Dv)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.geometry import Band
from flashwire_kernels.types import ITEM_SIZE
from flashwire_kernels.validation import Problem

SRAM_ELEMENTS = 131072  # 256 KiB of 16-bit elements: about what one SM holds
TILE = 128
MAX_LENGTH = 2**27  # tiles are counted block row by block row


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of `block` x `block` scores, over batch and query heads.

    visited tiles hold a visible pair; masked ones among them also hold a hidden one.
    """

    block: int
    total: int
    visited: int
    masked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes in bytes, arithmetic in floating-point operations.

    bytes_materialised_s   the whole score matrix in the request's dtype
    bytes_out_lse          what a flash forward keeps in its place
    materialised_ratio     the first over the second
    bytes_min              each input read once, out and lse written once
    bytes_flash            slow-memory traffic of a tiled forward with that much fast memory
    traffic_reduction      sram_elements / (D * Dv)
    intensity              flops_fwd / bytes_flash
    estimated_ms           forward, at the device's measured rate; None while there is none
    """

    visible_pairs: int
    flops_fwd: int
    flops_bwd: int
    bytes_materialised_s: int
    bytes_out_lse: int
    materialised_ratio: float
    bytes_min: int
    bytes_flash: int
    traffic_reduction: float
    sram_elements: int
    intensity: float
    tiles: Tiles
    estimated_ms: float | None


def plan(
    problem: Problem, *, sram_elements: int = SRAM_ELEMENTS, gflops: float | None = None
) -> Plan:
    """Count a Problem (a packed one with its offsets known). gflops is the device's forward rate.

    Raises InvalidAttention for sram_elements < 1, and for lengths beyond MAX_LENGTH.
    """
    wrong = []
    if sram_elements < 1:
        wrong.append(Violation("sram_elements", f"must be at least 1, got {sram_elements}"))
    if max(problem.len_q, problem.len_k) > MAX_LENGTH:
        longest = max(problem.len_q, problem.len_k)
        wrong.append(Violation("q", f"plans count lengths up to {MAX_LENGTH}, got {longest}"))
    if wrong:
        raise InvalidAttention(wrong)

    heads, item = problem.heads_q, ITEM_SIZE[problem.dtype]
    lengths = problem.lengths
    bands = {(lq, lk): Band.of(problem.spec, lq, lk) for lq, lk in lengths}
    pairs = heads * sum(n * bands[ls].visible_pairs(*ls) for ls, n in lengths.items())
    all_pairs = heads * sum(n * lq * lk for (lq, lk), n in lengths.items())
    bytes_out_lse = _bytes_out_lse(problem)
    bytes_min = _bytes_inputs(problem) + bytes_out_lse
    reduction = sram_elements / (problem.dim * problem.dim_v)
    bytes_flash = max(bytes_min, round(pairs * item / reduction))
    flops_fwd = 2 * pairs * (problem.dim + problem.dim_v)
    return Plan(
        visible_pairs=pairs,
        flops_fwd=flops_fwd,
        flops_bwd=2 * pairs * (3 * problem.dim + 2 * problem.dim_v),
        bytes_materialised_s=all_pairs * item,
        bytes_out_lse=bytes_out_lse,
        materialised_ratio=_ratio(all_pairs * item, bytes_out_lse),
        bytes_min=bytes_min,
        bytes_flash=bytes_flash,
        traffic_reduction=reduction,
        sram_elements=sram_elements,
        intensity=_ratio(flops_fwd, bytes_flash),
        tiles=_count_tiles([(heads * n, *ls, bands[ls]) for ls, n in lengths.items()]),
        estimated_ms=None if gflops is None else flops_fwd / (gflops * 1e6),
    )


def _ratio(a: int, b: int) -> float:
    return a / b if b else 0.0


def _bytes_out_lse(problem: Problem) -> int:
    rows = problem.tokens_q * problem.heads_q
    return rows * (problem.dim_v * ITEM_SIZE[problem.dtype] + ITEM_SIZE[problem.lse_dtype])


def _bytes_inputs(problem: Problem) -> int:
    elements = problem.tokens_q * problem.heads_q * problem.dim
    elements += problem.tokens_k * problem.heads_kv * (problem.dim + problem.dim_v)
    extra = (problem.mask, problem.bias, problem.alibi_slopes, problem.sinks)
    return elements * ITEM_SIZE[problem.dtype] + sum(h.nbytes for h in extra if h is not None)


def _count_tiles(parts: Sequence[tuple[int, int, int, Band]]) -> Tiles:
    """Over (how many times, len_q, len_k, band)."""
    total = visited = masked = 0
    for times, len_q, len_k, band in parts:
        seen, edge = _count_one(len_q, len_k, band)
        total += times * -(-len_q // TILE) * -(-len_k // TILE)
        visited += times * seen
        masked += times * edge
    return Tiles(block=TILE, total=total, visited=visited, masked=masked)


def _count_one(len_q: int, len_k: int, band: Band) -> tuple[int, int]:
    """(visited, masked) tiles of one head of one sequence, all block rows at once."""
    first = np.arange(0, len_q, TILE, dtype=np.int64)
    last = np.minimum(first + TILE, len_q)
    any_lo, all_lo = np.zeros_like(first), np.zeros_like(first)
    any_hi, all_hi = np.full_like(first, len_k), np.full_like(first, len_k)
    if band.left is not None:
        any_lo = np.maximum(0, first + band.offset - band.left)
        all_lo = np.maximum(0, last - 1 + band.offset - band.left)
    if band.right is not None:
        any_hi = np.minimum(len_k, last + band.offset + band.right)
        all_hi = np.minimum(len_k, first + band.offset + band.right + 1)
    visited = np.where(any_hi > any_lo, -(-any_hi // TILE) - any_lo // TILE, 0)
    whole_hi = np.where(all_hi == len_k, -(-len_k // TILE), all_hi // TILE)
    unmasked = np.maximum(0, whole_hi - -(-all_lo // TILE))
    return int(visited.sum()), int((visited - np.minimum(unmasked, visited)).sum())

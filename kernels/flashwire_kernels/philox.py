"""The dropout pattern: one definition for every backend, tile size and device.

Entry (b, h, i, j) of p is dropped when

    word[j & 3] of Philox4x32-10(counter = (j >> 2, i, h, b), key = (seed & 0xffffffff, seed >> 32))
        < floor(p * 2**32)

compared as unsigned 32-bit integers. b is the batch row, or the sequence's index in the packing; h
the query head; i and j count from the start of the row's own sequence. Nothing else enters.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
is ten rounds over four 32-bit words c0..c3 and two key words k0, k1:

    (hi0, lo0) = 0xD2511F53 * c0          64-bit product, high and low half
    (hi1, lo1) = 0xCD9E8D57 * c2
    c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
    k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85          modulo 2**32, after every round

Seed 0, p = 0.5, b = h = i = 0: the words of j = 0..3 are 6627e8d5 e169c58d bc57ac4c 9b00dbd8, so
that j = 0 is dropped and j = 1, 2, 3 are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

WORD = 0xFFFFFFFF
_MULTIPLY_C0, _MULTIPLY_C2 = 0xD2511F53, 0xCD9E8D57
_WEYL_K0, _WEYL_K1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_COUNTERS_AT_ONCE = 1 << 15  # as int64, the half dozen intermediates stay in a core's cache

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 of int64 tensors holding 32-bit words, of shapes that broadcast together.

    Only the low 32 bits of each returned int64 are the word; the others are arbitrary.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps modulo 2**64, which leaves the right 64 bits. c1 and c3 keep their high
        # halves: they only ever enter, by xor, what is masked afterwards.
        product0, product2 = c0 * _MULTIPLY_C0, c2 * _MULTIPLY_C2
        c0 = ((product2 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(WORD)
        c2 = ((product0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3 = product2, product0
        k0, k1 = (k0 + _WEYL_K0) & WORD, (k1 + _WEYL_K1) & WORD
    return c0, c1, c2, c3


def keep_tile(
    seed: int,
    p: float,
    *,
    batch: Sequence[int],
    heads: range,
    rows: range,
    cols: range,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which entries of a tile survive dropout with probability p in [0, 1) and a uint64 seed.

    `batch` holds batch rows or indices of packed sequences, in any order; `heads`, `rows` and
    `cols` are ranges of step 1.
    Returns bool (len(batch), len(heads), len(rows), len(cols)), True = kept.
    """
    first, last = cols.start // 4, -(-cols.stop // 4)
    shape = (len(batch), len(heads), len(rows), 4 * max(0, last - first))
    keep = torch.empty(shape, dtype=torch.bool, device=device)
    if keep.numel() == 0:
        return keep[..., : len(cols)]
    b, h, i, j = (_indices(some, device) for some in (batch, heads, rows, range(first, last)))
    key, threshold = (seed & WORD, seed >> 32), math.floor(p * 2.0**32)
    step = max(1, 4 * _COUNTERS_AT_ONCE * shape[2] // keep.numel())
    for row in range(0, shape[2], step):
        chunk = i[row : row + step, None]
        words = philox4x32((j, chunk, h[:, None, None], b[:, None, None, None]), key)
        for w, word in enumerate(words):
            torch.ge(word & WORD, threshold, out=keep[:, :, row : row + step, w::4])
    offset = cols.start - 4 * first
    return keep[..., offset : offset + len(cols)]


def _indices(values: Sequence[int], device: torch.device | str) -> torch.Tensor:
    if isinstance(values, range):
        return torch.arange(values.start, values.stop, values.step, device=device)
    return torch.tensor(values, dtype=torch.int64, device=device)

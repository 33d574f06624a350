"""The dropout pattern: published vectors, our own first values, and a second implementation."""

import math

import pytest
import torch

from flashwire_kernels.philox import WORD, keep_tile, philox4x32

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def scalar_philox(counter, key):
    """Philox4x32-10 in Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * c0, 2**32)
        hi1, lo1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def scalar_keep(seed, p, b, h, i, j):
    """The contract's rule for one entry."""
    words = scalar_philox((j // 4, i, h, b), (seed % 2**32, seed // 2**32))
    return words[j % 4] >= math.floor(p * 2**32)


def scalar_tile(seed, p, batch, heads, rows, cols):
    return torch.tensor(
        [[[[scalar_keep(seed, p, b, h, i, j) for j in cols] for i in rows] for h in heads]
         for b in batch]
    )  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(w) & WORD for w in words) == expected
    assert scalar_philox(counter, key) == expected


def test_first_values_are_pinned():
    tile = keep_tile(2026, 0.5, batch=range(2), heads=range(1), rows=range(2), cols=range(16))
    bits = ["".join("01"[int(kept)] for kept in row) for row in tile.flatten(0, 2)]
    assert bits == [
        "0110100111111111",
        "1000111101000100",
        "1100100001111000",
        "1100011010111010",
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1 - 2**-53])
def test_equals_the_scalar_rule(seed, p):
    where = {"batch": [3, 0], "heads": range(1, 3), "rows": range(5, 8), "cols": range(3, 14)}
    tile = keep_tile(seed, p, **where)
    assert tile.dtype == torch.bool
    assert torch.equal(tile, scalar_tile(seed, p, **where))


def test_large_indices():
    where = {
        "batch": [2**32 - 1],
        "heads": range(70_000, 70_001),
        "rows": range(2**31, 2**31 + 2),
        "cols": range(2**33 - 6, 2**33),
    }
    assert torch.equal(keep_tile(7, 0.5, **where), scalar_tile(7, 0.5, **where))


def test_any_tiling_gives_the_same_pattern():
    def tile(rows, cols):
        return keep_tile(9, 0.3, batch=range(2), heads=range(3), rows=rows, cols=cols)

    whole = tile(range(150), range(600))  # more counters than are drawn at once
    for rows, cols in [((0, 150), (0, 1)), ((149, 150), (597, 600)), ((7, 99), (42, 403))]:
        part = tile(range(*rows), range(*cols))
        assert torch.equal(part, whole[:, :, rows[0] : rows[1], cols[0] : cols[1]])


@pytest.mark.parametrize("empty", ["batch", "heads", "rows", "cols"])
def test_empty_tiles(empty):
    where = {name: range(2) for name in ("batch", "heads", "rows", "cols")} | {empty: range(0)}
    assert keep_tile(1, 0.5, **where).shape == tuple(len(r) for r in where.values())


def test_the_threshold_is_rounded_down_and_compared_strictly():
    """The first word of seed 0 is 0x6627E8D5."""
    first = {"batch": [0], "heads": range(1), "rows": range(1), "cols": range(1)}
    for words, kept in ((-0.5, True), (0.0, True), (0.5, True), (1.0, False), (1.5, False)):
        p = (0x6627E8D5 + words) / 2**32
        assert keep_tile(0, p, **first).item() == kept, words


def test_dropped_fraction():
    tile = keep_tile(5, 0.25, batch=range(1), heads=range(4), rows=range(256), cols=range(256))
    sigma = math.sqrt(0.25 * 0.75 / tile.numel())
    assert abs(float((~tile).double().mean()) - 0.25) < 4 * sigma

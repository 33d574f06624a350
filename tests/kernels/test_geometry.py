"""Band against the contract's rule, written out pair by pair."""

import itertools

import pytest

from flashwire_kernels.geometry import Band
from flashwire_kernels.types import AttentionSpec

SIZES = [(0, 0), (0, 4), (4, 0), (1, 1), (1, 6), (6, 1), (5, 5), (4, 7), (7, 4)]
WINDOWS = [None, (0, 0), (2, 0), (0, 2), (1, 3), (None, 1), (2, None), (50, 50), (2**70, 2**70)]
SPECS = [
    AttentionSpec(causal=causal, causal_align=align, window=window)
    for causal, align, window in itertools.product(
        (False, True), ("bottom_right", "top_left"), WINDOWS
    )
]


def sees(spec, i, j, len_q, len_k):
    """The contract, section 1."""
    pos = i + (len_k - len_q) if spec.causal_align == "bottom_right" else i
    left, right = spec.window or (None, None)
    return (
        (not spec.causal or j <= pos)
        and (left is None or pos - left <= j)
        and (right is None or j <= pos + right)
    )


def seen_keys(spec, rows, len_q, len_k):
    return [{j for j in range(len_k) if sees(spec, i, j, len_q, len_k)} for i in rows]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.causal}-{s.causal_align}-{s.window}")
def test_band_equals_the_rule(spec):
    for len_q, len_k in SIZES:
        assert_band_equals_the_rule(spec, len_q, len_k)


def assert_band_equals_the_rule(spec, len_q, len_k):
    band = Band.of(spec, len_q, len_k)
    rows = seen_keys(spec, range(len_q), len_q, len_k)
    assert band.visible_pairs(len_q, len_k) == sum(map(len, rows))
    for i, keys in enumerate(rows):
        ahead = [j - (i + band.offset) for j in range(len_k)]
        assert keys == {
            j
            for j, distance in enumerate(ahead)
            if (band.left is None or distance >= -band.left)
            and (band.right is None or distance <= band.right)
        }
    if band.open:
        assert all(len(keys) == len_k for keys in rows)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.causal}-{s.causal_align}-{s.window}")
def test_ranges_of_a_block_of_rows(spec):
    for len_q, len_k in SIZES:
        assert_ranges_of_a_block_of_rows(spec, len_q, len_k)


def assert_ranges_of_a_block_of_rows(spec, len_q, len_k):
    band = Band.of(spec, len_q, len_k)
    for first, last in itertools.combinations(range(len_q + 1), 2):
        rows = seen_keys(spec, range(first, last), len_q, len_k)
        any_keys, all_keys = set.union(*rows), set.intersection(*rows)
        assert set(range(*band.any_range(first, last, len_k))) == any_keys
        assert set(range(*band.all_range(first, last, len_k))) == all_keys


def test_ends_stay_small_enough_for_int64():
    band = Band.of(AttentionSpec(window=(2**200, 2**200)), 5, 7)
    assert (band.left, band.right) == (12, 12)


def test_counting_takes_no_time():
    n = 10**12
    assert Band.of(AttentionSpec(causal=True), n, n).visible_pairs(n, n) == n * (n + 1) // 2
    window = AttentionSpec(causal=True, window=(9, 0))
    assert Band.of(window, n, n).visible_pairs(n, n) == 10 * n - 45

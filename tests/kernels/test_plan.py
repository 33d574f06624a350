"""plan.py: the worked numbers of the contract, and counts against brute force."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from flashwire_kernels.errors import InvalidAttention
from flashwire_kernels.geometry import Band
from flashwire_kernels.plan import TILE, plan
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import Problem, resolve


def problem(
    shape_q: tuple[int, ...],
    shape_k: tuple[int, ...] | None = None,
    shape_v: tuple[int, ...] | None = None,
    dtype: str = "float16",
    **options: object,
) -> Problem:
    shape_k = shape_k or shape_q
    shapes = {"q": shape_q, "k": shape_k, "v": shape_v or shape_k}
    spec = AttentionSpec(**options)  # type: ignore[arg-type]
    return resolve(spec, {n: TensorHeader(dtype, s) for n, s in shapes.items()})


def test_worked_numbers_of_one_long_head() -> None:
    p = plan(problem((1, 1, 16384, 128)), sram_elements=131072)
    assert p.bytes_materialised_s == 536870912
    assert p.bytes_out_lse == 4259840
    assert round(p.materialised_ratio, 2) == 126.03
    assert p.traffic_reduction == 8
    assert p.bytes_flash == 536870912 // 8
    assert p.flops_fwd == 4 * 16384**2 * 128
    assert p.flops_bwd == p.flops_fwd * 5 // 2
    assert p.bytes_min == 3 * 16384 * 128 * 2 + 4259840


def test_causal_and_window_are_counted_exactly() -> None:
    causal = plan(problem((2, 3, 100, 16), causal=True))
    assert causal.flops_fwd == 2 * 3 * 2 * (100 * 101 // 2) * 32
    window = plan(problem((1, 1, 100, 16), causal=True, window=(23, 0)))
    assert window.visible_pairs == 24 * 25 // 2 + 76 * 24
    assert window.flops_fwd == 2 * window.visible_pairs * 32


def test_a_mask_counts_as_all_visible() -> None:
    headers = {n: TensorHeader("float32", (1, 2, 8, 4)) for n in "qkv"}
    headers["mask"] = TensorHeader("bool", (8, 8))
    masked = plan(resolve(AttentionSpec(), headers))
    assert masked.visible_pairs == 2 * 64
    assert masked.bytes_min == 4 * 4 * 64 + 2 * 8 * 4 + 64


def test_gqa_reads_key_heads_once_and_computes_query_heads() -> None:
    p = plan(problem((1, 8, 64, 32), (1, 2, 128, 32), (1, 2, 128, 48)))
    assert p.flops_fwd == 2 * 8 * 64 * 128 * (32 + 48)
    assert p.flops_bwd == 2 * 8 * 64 * 128 * (3 * 32 + 2 * 48)
    inputs = 8 * 64 * 32 + 2 * 128 * (32 + 48)
    assert p.bytes_min == 2 * inputs + 8 * 64 * (48 * 2 + 4)


def test_packed_counts_each_sequence() -> None:
    headers = {n: TensorHeader("float32", (10, 2, 8)) for n in "qkv"}
    headers |= {f"cu_seqlens_{n}": TensorHeader("int32", (4,)) for n in "qk"}
    packed = resolve(AttentionSpec(causal=True), headers).with_offsets([0, 3, 3, 8], [0, 3, 4, 9])
    p = plan(packed)
    assert p.visible_pairs == 2 * (6 + 0 + 15)
    assert p.bytes_materialised_s == 2 * (9 + 0 + 25) * 4


def test_zero_sizes() -> None:
    p = plan(problem((0, 4, 16, 8)))
    assert p.flops_fwd == p.bytes_min == 0
    assert p.intensity == 0
    assert plan(problem((1, 1, 5, 8), (1, 1, 0, 8))).visible_pairs == 0


def test_refusals_name_the_field() -> None:
    with pytest.raises(InvalidAttention, match="sram_elements"):
        plan(problem((1, 1, 4, 4)), sram_elements=0)
    with pytest.raises(InvalidAttention, match=str(2**40)):
        plan(problem((1, 1, 2**40, 4)))


def test_estimate_needs_a_rate() -> None:
    assert plan(problem((1, 1, 128, 64))).estimated_ms is None
    p = plan(problem((1, 1, 128, 64)), gflops=100.0)
    assert p.estimated_ms == pytest.approx(p.flops_fwd / 1e8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [None, (0, 0), (130, None), (None, 7), (200, 150)])
def test_tiles_equal_brute_force(
    causal: bool, align: str, window: tuple[int | None, int | None] | None
) -> None:
    lengths = [1, 127, 128, 300, 513]
    for len_q, len_k in itertools.product(lengths, lengths):
        one = problem(
            (1, 1, len_q, 4), (1, 1, len_k, 4), causal=causal, causal_align=align, window=window
        )
        band = Band.of(one.spec, len_q, len_k)
        left = -(2**40) if band.left is None else -band.left
        right = 2**40 if band.right is None else band.right
        visited = masked = 0
        for i0, j0 in itertools.product(range(0, len_q, TILE), range(0, len_k, TILE)):
            visible = [
                left <= j - i - band.offset <= right
                for i in range(i0, min(i0 + TILE, len_q), 1)
                for j in {j0, min(j0 + TILE, len_k) - 1}
            ]
            corners_hidden = not all(visible)
            inside = any(visible) or any(
                left <= j - i - band.offset <= right
                for i in range(i0, min(i0 + TILE, len_q))
                for j in range(j0, min(j0 + TILE, len_k))
            )
            visited += inside
            masked += inside and corners_hidden
        tiles = plan(one).tiles
        assert (tiles.visited, tiles.masked) == (visited, masked), (len_q, len_k, one.spec)


def test_heads_and_batch_multiply_tiles() -> None:
    single = plan(problem((1, 1, 300, 8), causal=True)).tiles
    many = plan(problem((2, 3, 300, 8), causal=True)).tiles
    assert many == dataclasses.replace(
        single, total=6 * single.total, visited=6 * single.visited, masked=6 * single.masked
    )

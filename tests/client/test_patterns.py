"""What masks say: recognised exactly, or not at all."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from flashwire.patterns import Pattern, PatternMask, recognise
from flashwire.transformers import make_mask

CPU = torch.device("cpu")
PATTERNS = [
    Pattern(offset, left, right, lengths)
    for offset, left, right in itertools.product((0, 3), (None, 0, 2), (None, 0, 1))
    for lengths in (None, (4, 1, 3))
    if lengths is None or (offset == 0 and left != 0)  # 0 leaves nothing to tell sequences by
]


def by_formula(pattern: Pattern, rows: int, columns: int) -> torch.Tensor:
    """Entry by entry, as docs/contract.md has it."""
    sequence = [s for s, n in enumerate(pattern.lengths or (columns,)) for _ in range(n)]
    return torch.tensor(
        [
            [
                (pattern.left is None or j >= i + pattern.offset - pattern.left)
                and (pattern.right is None or j <= i + pattern.offset + pattern.right)
                and (pattern.lengths is None or sequence[i] == sequence[j])
                for j in range(columns)
            ]
            for i in range(rows)
        ]
    )


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_pattern_is_known_by_its_mask(pattern: Pattern) -> None:
    columns = 8 + pattern.offset
    mask = by_formula(pattern, 8, columns)
    assert torch.equal(pattern.dense(8, columns, CPU)[0, 0], mask)
    found = recognise(mask.expand(2, 1, -1, -1), pattern.offset)
    assert found is not None
    assert torch.equal(found.dense(8, columns, CPU)[0, 0], mask)


def test_a_mask_off_by_one_entry_is_not_taken_for_a_pattern() -> None:
    mask = by_formula(Pattern(2, left=4, right=0), 6, 8)[None, None]
    for i, j in itertools.product(range(6), range(8)):
        other = mask.clone()
        other[..., i, j] ^= True
        found = recognise(other, 2)
        assert found is None or torch.equal(found.dense(6, 8, CPU), other)
        assert recognise(torch.cat([mask, other]), 2) is None


def test_random_masks_are_never_misread() -> None:
    generator = torch.Generator().manual_seed(0)
    for density in (0.3, 0.7, 0.95):
        for _ in range(50):
            mask = torch.rand(1, 1, 4, 4, generator=generator) < density
            found = recognise(mask, 0)
            assert found is None or torch.equal(found.dense(4, 4, CPU), mask)


FUNCTIONS = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "both sides": sliding_window_bidirectional_mask_function(2),
    "prefix": or_masks(causal_mask_function, lambda b, h, q, kv: kv < 3),
    "chunks": and_masks(causal_mask_function, lambda b, h, q, kv: q // 4 == kv // 4),
    "packed": and_masks(
        causal_mask_function, packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 9]))
    ),
}
NAMED = {"causal", "window", "both sides"}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "q_offset", "kv_offset"),
    [(7, 7, 0, 0), (1, 7, 6, 0), (3, 7, 4, 0), (3, 7, 2, 0), (7, 12, 0, 0), (3, 5, 6, 4)],
)
def test_masks_are_what_transformers_own_would_be(
    kind: str, padded: bool, rows: int, columns: int, q_offset: int, kv_offset: int
) -> None:
    seen = torch.ones(1, q_offset + rows, dtype=torch.bool)
    if padded:
        seen[0, : kv_offset + 2] = False
    given = {
        "batch_size": 1, "q_length": rows, "kv_length": columns, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": FUNCTIONS[kind], "attention_mask": seen,
    }  # fmt: skip
    want = sdpa_mask(**given, allow_is_causal_skip=False)  # type: ignore[arg-type]
    mask = make_mask(**given)  # type: ignore[arg-type]
    assert mask.shape == want.shape
    dense = mask.dense() if isinstance(mask, PatternMask) else mask
    assert torch.equal(dense, want)
    absent = rows + q_offset - kv_offset < columns  # a static cache, of which a part is filled
    if kind == "causal" or (kind in NAMED and not absent):
        assert isinstance(mask, PatternMask)


def test_it_turns_into_its_mask_when_one_computes_with_it() -> None:
    mask = make_mask(2, 3, 4, q_offset=1)
    assert isinstance(mask, PatternMask)
    dense = torch.ones(3, 4).tril(1).bool().expand(2, 1, 3, 4)
    for changed in (mask[:, :, :, :2], mask & True, mask.to(torch.float32), ~mask, mask.clone()):
        assert type(changed) is torch.Tensor
    assert torch.equal(mask[:, :, :, :2], dense[..., :2])
    assert torch.equal(torch.cat([mask, mask]), torch.cat([dense, dense]))

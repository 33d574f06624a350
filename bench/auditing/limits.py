"""The limits that no budget moves."""

from __future__ import annotations

from auditing.cases import Case

_PER_SCORE = {"sm_80": 10.0, "sm_90": 8.0, "sm_100": 8.0}
_TENSOR = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}

MAX_COMPARES = 20
"""Comparisons and choices of integers that a loop's own business takes: its counter, and the places
in buffers that several tiles share. A mask takes one per score.
"""


def may_spill(case: Case) -> bool:
    """Whether a budget may allow it."""
    return case.kind != "forward" or case.dim > 128


def per_score(case: Case) -> float | None:
    """Instructions per score that the forward's steady loop may have; None: see the budget."""
    limited = case.kind == "forward" and case.width == "half" and case.dim <= 128
    return _PER_SCORE.get(case.arch) if limited and case.variant.plain else None


def matrix_name(case: Case) -> str | None:
    """How the names of matrix instructions begin; None where there need be none.

    A decode has fewer rows than Hopper's and Blackwell's own instructions take, and at D of 256, or
    of 128 in a backward of float32, few fit beside what a block keeps: there, those of Ampere do.
    """
    if case.width == "single" and case.variant.name != "tf32":
        return None
    wide = case.width == "single" and case.kind != "forward"
    if case.kind == "decode" or case.dim > (64 if wide else 128):
        return "v_mfma" if case.arch.startswith("gfx") else ""
    return _TENSOR.get(case.arch, "HMMA")


def max_multiply_adds(case: Case) -> float:
    """Per score, on ordinary lanes, where matrix instructions do not tell how much they do. Each
    product of a tile takes a head dimension of them there; a modified score takes a dozen.
    """
    return case.dim / 2

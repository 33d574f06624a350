"""Which keys a query sees by position alone: causal order, windows, and their alignment.

One definition, used by planning, by tile loops and by the reference's mask. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashwire_kernels.types import AttentionSpec


@dataclass(frozen=True, slots=True)
class Band:
    """Key j is visible to query i when -left <= j - (i + offset) <= right; None is open."""

    offset: int
    left: int | None
    right: int | None

    @classmethod
    def of(cls, spec: AttentionSpec, len_q: int, len_k: int) -> Band:
        """The band of one sequence of len_q queries and len_k keys.

        No key is further than len_q + len_k from a query: ends beyond are brought back to it, so
        that tile loops may compute with them in int64.
        """
        far = len_q + len_k
        left, right = (
            None if end is None else min(end, far) for end in spec.window or (None, None)
        )
        if spec.causal:
            right = 0  # a window's right end is never below 0, so causal always clips first
        return cls(position_offset(spec, len_q, len_k), left, right)

    @property
    def open(self) -> bool:
        """True when position hides nothing."""
        return self.left is None and self.right is None

    def any_range(self, first: int, last: int, len_k: int) -> tuple[int, int]:
        """[lo, hi) of the keys that at least one row of [first, last) sees; lo >= hi when none."""
        lo = 0 if self.left is None else max(0, first + self.offset - self.left)
        hi = len_k if self.right is None else min(len_k, last + self.offset + self.right)
        return lo, hi

    def all_range(self, first: int, last: int, len_k: int) -> tuple[int, int]:
        """[lo, hi) of the keys that every row of [first, last) sees; lo >= hi when none."""
        lo = 0 if self.left is None else max(0, last - 1 + self.offset - self.left)
        hi = len_k if self.right is None else min(len_k, first + self.offset + self.right + 1)
        return lo, hi

    def visible_pairs(self, len_q: int, len_k: int) -> int:
        """The exact number of visible (query, key) pairs, in constant time."""
        below_hi = (
            len_q * len_k
            if self.right is None
            else _sum_clamped(self.offset + self.right + 1, len_q, len_k)
        )
        below_lo = 0 if self.left is None else _sum_clamped(self.offset - self.left, len_q, len_k)
        return below_hi - below_lo


def position_offset(spec: AttentionSpec, len_q: int, len_k: int) -> int:
    """pos(i) - i."""
    return len_k - len_q if spec.causal_align == "bottom_right" else 0


def _sum_clamped(start: int, count: int, top: int) -> int:
    """sum over i in [0, count) of min(max(start + i, 0), top)."""
    rising_from = min(max(-start, 0), count)
    rising_to = min(max(top - start, 0), count)
    rising = rising_to - rising_from
    first, last = start + rising_from, start + rising_to - 1
    return (first + last) * rising // 2 + (count - rising_to) * top

"""What a boolean attention mask says, in the few words that options of an attention have for it.

For `flashwire.transformers`: a model's mask is looked at once, and when its pattern has a name
(causal, a window, packed sequences, padding) the name travels in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Pattern:
    """Query i sees key j when pos(i) - left <= j <= pos(i) + right with pos(i) = i + offset.

    left, right  None is open; right = 0 is causal
    lengths      of packed sequences, laid end to end in queries and keys alike (offset 0 then);
                 each sees itself only. None is one sequence
    padding      (B, 1, 1, Lk), True where the key may be seen; None where every key may
    """

    offset: int = 0
    left: int | None = None
    right: int | None = None
    lengths: tuple[int, ...] | None = None
    padding: torch.Tensor | None = None

    def dense(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """The mask itself, boolean, (1 or B, 1, rows, columns)."""
        j = torch.arange(columns, device=device)
        at = torch.arange(rows, device=device)[:, None] + self.offset
        visible = torch.ones(rows, columns, dtype=torch.bool, device=device)
        if self.left is not None:
            visible &= j >= at - self.left
        if self.right is not None:
            visible &= j <= at + self.right
        if self.lengths is not None:
            lengths = torch.tensor(self.lengths, device=device)
            sequence = torch.arange(len(self.lengths), device=device).repeat_interleave(lengths)
            visible &= sequence[:, None] == sequence
        return visible[None, None] if self.padding is None else visible & self.padding

    def keys(self, rows: int, columns: int) -> int | None:
        """How many keys, from the first, to attend to so that bottom-right alignment gives offset.

        None when no number does: then only `dense` says it.
        """
        if self.left is None and self.right is None:
            return columns
        wanted = rows + self.offset
        hides_the_rest = self.right == 0 and wanted <= columns
        return wanted if hides_the_rest or wanted == columns else None


def recognise(mask: torch.Tensor, offset: int) -> Pattern | None:
    """The pattern without padding that `mask`, boolean (B, 1, Lq, Lk), is exactly; None if none is.

    offset  of the queries among the keys
    """
    rows = mask[0, 0]
    if mask.shape[0] > 1 and mask.stride(0) != 0 and not bool((mask == rows).all()):
        return None
    height, width = rows.shape
    if rows.numel() == 0 or not bool(rows.any(-1).all()):
        return None
    first = rows.byte().argmax(-1)
    last = width - 1 - rows.flip(-1).byte().argmax(-1)
    whole = torch.zeros_like(first), torch.full_like(last, width)
    guesses = [_banded(first, last, whole, offset)]
    if height == width and offset == 0:
        index = torch.arange(height, device=mask.device)
        starts = index[first == index]
        lengths = torch.diff(starts, append=starts.new_tensor([height]))
        bounds = (
            starts.repeat_interleave(lengths), (starts + lengths).repeat_interleave(lengths)
        )  # fmt: skip
        if len(starts) and starts[0] == 0:
            guesses.append(_banded(first, last, bounds, offset, tuple(lengths.tolist())))
    for guess in guesses:
        if guess and torch.equal(guess.dense(height, width, mask.device)[0, 0], rows):
            return guess
    return None


def _banded(
    first: torch.Tensor,
    last: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    offset: int,
    lengths: tuple[int, ...] | None = None,
) -> Pattern | None:
    """The band whose rows see from first to last, each cut to its bounds [start, end)."""
    at = torch.arange(len(first), device=first.device) + offset
    left = (at - first)[first > bounds[0]]
    right = (last - at)[last < bounds[1] - 1]
    if any(len(end) and bool((end != end[0]).any()) for end in (left, right)):
        return None
    ends = [int(end[0]) if len(end) else None for end in (left, right)]
    return Pattern(offset, ends[0], ends[1], lengths)


class PatternMask(torch.Tensor):
    """A mask (B, 1, Lq, Lk) that is only its pattern, until somebody computes with it.

    Models hand masks on, and some cut or combine them: then it turns into the boolean tensor that
    it stands for, so nothing that it hides is ever shown.
    """

    pattern: Pattern

    @staticmethod
    def __new__(cls, pattern: Pattern, shape: tuple[int, ...], device: torch.device) -> PatternMask:
        made: PatternMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=device
        )
        made.pattern = pattern
        return made

    def dense(self) -> torch.Tensor:
        """The boolean tensor of this shape."""
        rows, columns = self.shape[2:]
        return self.pattern.dense(rows, columns, self.device).expand(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

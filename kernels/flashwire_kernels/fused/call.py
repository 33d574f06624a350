"""A kernel and what to launch it with, so that an audit can compile exactly what would run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashwire_kernels.fused.config import Config

UNSPECIALISED = [
    "left", "right", "key0", "key1", "threshold", "len_q", "len_k",
    "tiles", "heads", "heads_per_row", "heads_at_once",
    "splits", "heads_kv", "heads_q", "part_rows",
]  # fmt: skip
"""Arguments whose values must not compile a kernel anew. Triton heeds this of numbers alone: those
in a tuple, it specialises on being 1 or a multiple of 16 all the same.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One launch of a kernel over a grid of `programs`, all on the first axis: it alone may be
    longer than 65535.
    """

    kernel: Any
    programs: int
    positional: tuple[Any, ...]
    constants: dict[str, Any]
    config: Config

    def launch(self) -> None:
        """Nothing where there are no programs."""
        if self.programs:
            grid = (self.programs,)
            self.kernel[grid](*self.positional, **self.constants, **self.config.options)

"""What travels: tensors of a request, float32, chosen so that computing is small beside moving."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """An attention of q (B, H, Lq, D) with keys and values (B, H, Lk, D). `up`, `down` in bytes."""

    name: str
    q: tuple[int, int, int, int]
    keys: int
    calls: int  # in a round

    @property
    def kv(self) -> tuple[int, int, int, int]:
        batch, heads, _, dim = self.q
        return batch, heads, self.keys, dim

    @property
    def up(self) -> int:
        return 4 * (math.prod(self.q) + 2 * math.prod(self.kv))

    @property
    def down(self) -> int:
        return 4 * math.prod(self.q)

    def tensors(self) -> tuple[Array, Array, Array]:
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in (self.q, self.kv, self.kv))
        return q, k, v


TINY = Case("16 KiB", (1, 1, 16, 64), 24, 20)
DECODE = Case("67 MB", (1, 8, 1, 64), 16384, 1)
BATCH = Case("50 MB / 17 MB", (64, 16, 64, 64), 64, 1)
CASES = (
    TINY,
    Case("768 KiB", (1, 8, 128, 64), 128, 8),
    Case("3 MB", (1, 8, 512, 64), 512, 4),
    DECODE,
    BATCH,
)

"""Figures, limits and budget -> violations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from auditing import limits
from auditing.budget import Allowance
from auditing.figures import Kernel, Loop
from flashwire_kernels.fused.config import SHARED_BYTES, family


def violations(kernel: Kernel, allowed: Allowance) -> Iterator[str]:
    """Every rule that a kernel breaks, in words."""
    case = kernel.case
    there = SHARED_BYTES[family(case.arch)]
    if kernel.shared > there:
        yield f"needs {kernel.shared} bytes of shared memory, and {there} are there"
    spill = allowed.spill if limits.may_spill(case) else 0
    if kernel.spilled > spill:
        yield f"spills {kernel.spilled} bytes, {spill} allowed"
    if not kernel.main:
        return
    if kernel.loop is None:
        yield "has no loop that takes an exponential of each score"
        return
    yield from _products(kernel, kernel.loop)
    if case.variant.plain:
        yield from _instructions(kernel, kernel.loop, allowed)
        if case.width == "half":
            yield from _masks(kernel.loop)
            yield from _copies(kernel, kernel.loop, allowed)


def _products(kernel: Kernel, loop: Loop) -> Iterator[str]:
    """On matrix cores, all of them, and by the instructions that the architecture is fast with."""
    wanted = limits.matrix_name(kernel.case)
    if wanted is None:
        return
    others = [name for name in loop.matrix_names if not name.startswith(wanted)]
    if not loop.matrix:
        yield "has no matrix instructions in its steady loop"
    elif others:
        yield f"multiplies by {', '.join(others)} in place of {wanted}"
    per_score = loop.multiply_adds / (loop.scores * loop.tiles)
    if loop.matrix and loop.products < 1:
        yield f"multiplies off the matrix cores: {loop.products:.0%} of the products are on them"
    if math.isnan(loop.products) and per_score > limits.max_multiply_adds(kernel.case):
        yield f"multiplies off the matrix cores: {per_score:.0f} multiply-adds per score"


def _masks(loop: Loop) -> Iterator[str]:
    """Where nothing is hidden, nothing is chosen between. Not asked of float32, which has the same
    source, and whose changes of layout choose, too.
    """
    if loop.selects:
        yield f"chooses between numbers {loop.selects} times where nothing is hidden"
    if loop.compares > limits.MAX_COMPARES * loop.tiles:
        yield f"compares integers {loop.compares} times where nothing is hidden"


def _instructions(kernel: Kernel, loop: Loop, allowed: Allowance) -> Iterator[str]:
    most = limits.per_score(kernel.case) or allowed.per_score
    if most is None:
        yield f"takes {loop.per_score:.2f} instructions per score, and the budget has no line of it"
    elif loop.per_score > most + 1e-9:
        yield f"takes {loop.per_score:.2f} instructions per score, {most:g} allowed"


def _copies(kernel: Kernel, loop: Loop, allowed: Allowance) -> Iterator[str]:
    """Tiles come by asynchronous copies, where there are any (NVIDIA)."""
    if loop.other_loads:
        yield f"loads tiles past the asynchronous copies, {loop.other_loads} times"
    words = allowed.loads if kernel.case.kind in ("keys", "queries") else 0
    if loop.loads > words:
        yield f"loads {loop.loads} words past the asynchronous copies, {words} allowed"
    if loop.narrow_stores:
        yield f"stores {loop.narrow_stores} numbers singly to shared memory"

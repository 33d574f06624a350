"""Figures -> text."""

from __future__ import annotations

from auditing.bounds import CARDS
from auditing.cases import Case
from auditing.figures import Kernel

_COLUMNS = (
    ("kernel", -50), ("tile", -16), ("regs", 4), ("spill", 5), ("shared", 6), ("matrix", 12),
    ("exp", 5), ("n/score", 7), ("tensor", 6), ("exp", 5), ("issue", 6), ("serial", 6),
    ("parallel", 8), ("s", 5),
)  # fmt: skip

LEGEND = """\
tile     queries x keys, warps, stages, d: by descriptors      matrix, exp  in an iteration of the
regs     per thread                                                         steady loop
spill    bytes per thread                                      n/score      all others, per score
shared   bytes per block
tensor, exp, issue   clocks of a multiprocessor per tile       serial, parallel  TFLOP/s of the card
                                                               if nothing, everything overlaps
s        of compilation; - where Triton had it cached"""


def head(asked: list[Case]) -> str:
    """Above the first line."""
    cards = (f"{arch}: {CARDS[arch].name}" for arch in dict.fromkeys(case.arch for case in asked))
    return f"{LEGEND}\ncards    {', '.join(cards)}\n\n{_row([name for name, _ in _COLUMNS])}"


def line(kernel: Kernel) -> str:
    """One kernel."""
    loop = kernel.loop
    seconds = "-" if kernel.seconds is None else f"{kernel.seconds:.1f}"
    first = [str(kernel), kernel.launched, kernel.registers, kernel.spilled, kernel.shared]
    if loop is None:
        return _row([*first, *[""] * 8, seconds])
    b = loop.bound
    name = loop.matrix_names[0].partition(".")[0].partition("_f32")[0] if loop.matrix else "none"
    counts = [f"{name}:{loop.matrix}", loop.exponentials, f"{loop.per_score:.2f}"]
    clocks = [f"{figure:.0f}" for figure in (b.tensor, b.exponential, b.issue)]
    return _row([*first, *counts, *clocks, f"{b.serial:.0f}", f"{b.parallel:.0f}", seconds])


def opcodes(kernel: Kernel) -> str:
    """Of the steady loop, the most frequent first."""
    counts = {} if kernel.loop is None else kernel.loop.opcodes
    return "    " + " ".join(f"{name}:{n}" for name, n in counts.items())


def _row(cells: list[object]) -> str:
    aligned = (
        f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
        for cell, (_, width) in zip(map(str, cells), _COLUMNS, strict=True)
    )
    return " ".join(aligned).rstrip()

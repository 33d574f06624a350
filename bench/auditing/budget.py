"""What kernels may spend where no fixed limit says: a table in a file, so that a change is seen."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from auditing import limits
from auditing.cases import Case, cases
from auditing.figures import Kernel

_HEAD = """\
# What `make audit` allows where no fixed limit says; docs/performance.md explains the figures.
# Written by `python bench/audit.py --write-budget`, with the versions of constraints.txt.
#
#   per_score  instructions other than matrix ones per score, in the steady loop
#   spill      bytes that a thread of any of the kernels may spill
#   loads      loads of a word (lse, delta) past the asynchronous copies, in the steady loop
"""

_TOGETHER = ("dense", "causal", "grouped")
"""Variants that share a line, as high as the highest of them."""

_WORTH_LOWERING = 0.98

Place = tuple[str, str]
"""A section, and the name of a line in it."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """A line. per_score None: nobody has allowed any figure."""

    per_score: float | None = None
    spill: int = 0
    loads: int = 0


def place(case: Case) -> Place:
    """The line that speaks of a case."""
    variant = "" if case.variant.name in _TOGETHER else f"_{case.variant.name}"
    return f"{case.arch}.{case.width}", f"{case.kind}_d{case.dim}{variant}"


@dataclass(frozen=True, slots=True)
class Budget:
    """The lines of a file."""

    lines: dict[Place, Allowance]

    def of(self, case: Case) -> Allowance:
        return self.lines.get(place(case), Allowance())


def read(path: Path) -> Budget:
    """An absent file allows nothing. Raises ValueError for a line of no case, TypeError for a field
    that is none.
    """
    if not path.exists():
        return Budget({})
    lines = {
        (f"{arch}.{width}", name): Allowance(**fields)
        for arch, widths in tomllib.loads(path.read_text()).items()
        for width, named in widths.items()
        for name, fields in named.items()
    }
    strange = set(lines) - {place(case) for case in cases()}
    if strange:
        raise ValueError(f"{path.name} has lines of nothing that is audited: {sorted(strange)}")
    return Budget(lines)


def renewed(budget: Budget, kernels: Iterable[Kernel]) -> Budget:
    """With what was measured in place of what was allowed. A line stays unless all cases that share
    it were measured.
    """
    kernels = list(kernels)
    measured = {kernel.case for kernel in kernels}
    kept = {place(case) for case in cases() if case not in measured}
    highest: dict[Place, Allowance] = {}
    for kernel in kernels:
        at = place(kernel.case)
        if at not in kept:
            highest[at] = _with(highest.get(at, Allowance()), kernel)
    return Budget(budget.lines | highest)


def could_be_lower(budget: Budget, kernels: Iterable[Kernel]) -> Iterator[str]:
    """Lines that allow 2% more than the highest of their cases takes."""
    for at, line in renewed(budget, kernels).lines.items():
        for name in ("per_score", "spill", "loads"):
            takes, allowed = (getattr(of, name) or 0 for of in (line, budget.lines.get(at, line)))
            if takes < allowed and takes <= allowed * _WORTH_LOWERING:
                yield f"{at[0]} {at[1]}: {name} is {takes}, {allowed} allowed"


def _with(allowed: Allowance, kernel: Kernel) -> Allowance:
    """Raised to what a kernel takes, where a budget may allow that."""
    case, loop = kernel.case, kernel.loop
    if limits.may_spill(case):
        allowed = replace(allowed, spill=max(allowed.spill, kernel.spilled))
    if loop is None or not case.variant.plain:
        return allowed
    if case.kind in ("keys", "queries"):
        allowed = replace(allowed, loads=max(allowed.loads, loop.loads))
    if limits.per_score(case) is None:
        figure = math.ceil(loop.per_score * 100 - 1e-9) / 100
        allowed = replace(allowed, per_score=max(allowed.per_score or 0, figure))
    return allowed


def text(budget: Budget) -> str:
    """In the order of the table; a line that allows nothing is left out."""
    found, section = [_HEAD], ""
    places = list(dict.fromkeys(place(case) for case in cases()))
    sections = [at[0] for at in places]
    for at in sorted(places, key=lambda at: sections.index(at[0])):
        fields = _fields(budget.lines.get(at, Allowance()))
        if not fields:
            continue
        found.append(f"\n[{at[0]}]\n" if at[0] != section else "")
        found.append(f"{at[1]} = {{ {', '.join(fields)} }}\n")
        section = at[0]
    return "".join(found)


def _fields(allowed: Allowance) -> list[str]:
    found = [] if allowed.per_score is None else [f"per_score = {allowed.per_score:.2f}"]
    found += [f"spill = {allowed.spill}"] if allowed.spill else []
    return found + ([f"loads = {allowed.loads}"] if allowed.loads else [])

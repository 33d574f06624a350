"""Compile the GPU kernels ahead of time, without a GPU, and judge what the compiler made of them.

    python bench/audit.py                                     everything: make audit
    python bench/audit.py --arch sm_90 --pass forward --dim 64 128 --width half --plain --opcodes
    python bench/audit.py "sm_90 forward half d* causal" "gfx942 *"
    python bench/audit.py --write-budget
    python bench/audit.py --compile-only                      with the Triton that Python finds

Exits with 1 when a kernel breaks a rule; docs/performance.md tells the rules and what is counted.
The kernels are those of the flashwire_kernels that Python finds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

import triton

from auditing import budget, table
from auditing.cases import ARCHES, DIMS, DTYPES, VARIANTS, Case, calls, cases
from auditing.compiling import DoesNotCompile, build
from auditing.figures import Kernel, measure
from auditing.judging import violations
from flashwire_kernels.fused.config import PASSES

BUDGET = Path(__file__).parent / "audit_budget.toml"

Found = TypeVar("Found")


def main() -> int:
    chosen = _arguments()
    asked = [case for case in cases() if _asked_for(case, chosen)]
    print(f"triton {triton.__version__}")
    return (_compile_only if chosen.compile_only else _audit)(asked, chosen)


def _compile_only(asked: list[Case], chosen: argparse.Namespace) -> int:
    refused, kernels = [], 0
    for case, found in _each(asked, _compiled, chosen.jobs):
        if isinstance(found, str):
            print(f"{case}: does not compile: {found}", flush=True)
            refused.append(case)
        else:
            kernels += found
    print(f"cases: {len(asked) - len(refused)} compile ({kernels} kernels), {len(refused)} do not")
    return bool(refused)


def _audit(asked: list[Case], chosen: argparse.Namespace) -> int:
    allowed = budget.read(chosen.budget)
    kernels, wrong = [], []
    print(table.head(asked))
    for case, found in _each(asked, _measured, chosen.jobs):
        if isinstance(found, str):
            wrong.append(f"{case}: does not compile: {found}")
            continue
        for kernel in found:
            print(table.line(kernel), flush=True)
            if chosen.opcodes and kernel.loop is not None:
                print(table.opcodes(kernel))
        kernels += found
    if chosen.write_budget:
        allowed = budget.renewed(allowed, kernels)
        chosen.budget.write_text(budget.text(allowed))
    for kernel in kernels:
        wrong += [f"{kernel}: {text}" for text in violations(kernel, allowed.of(kernel.case))]
    _say("could be lowered in the budget", list(budget.could_be_lower(allowed, kernels)))
    _say("violations", wrong)
    return bool(wrong)


def _say(what: str, found: list[str]) -> None:
    print(f"\n{len(found)} {what}")
    for text in found:
        print(f"  {text}")


def _each(
    asked: list[Case], attempt: Callable[[Case], Found], jobs: int
) -> Iterator[tuple[Case, Found]]:
    """In the order asked."""
    if jobs == 1:
        yield from zip(asked, map(attempt, asked), strict=True)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            yield from zip(asked, pool.map(attempt, asked), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)  # else, after an interrupt, it would do the rest


def _measured(case: Case) -> list[Kernel] | str:
    """The kernels of a case, or why one of them does not compile."""
    try:
        return measure(case)
    except DoesNotCompile as error:
        return str(error)


def _compiled(case: Case) -> int | str:
    """How many kernels a case has, or why one of them does not compile."""
    try:
        return len([build(call, case.arch) for call in calls(case)])
    except DoesNotCompile as error:
        return str(error)


def _asked_for(case: Case, chosen: argparse.Namespace) -> bool:
    return (
        case.arch in chosen.arch
        and case.kind in chosen.kinds
        and case.width in chosen.width
        and case.dim in chosen.dim
        and case.variant.name in chosen.variant
        and (not chosen.plain or case.variant.plain)
        and (not chosen.modified or case.variant.modified)
        and any(fnmatch(str(case), pattern) for pattern in chosen.patterns)
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(dict.fromkeys(v.name for v in VARIANTS))
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of cases, with wildcards")
    parser.add_argument("--arch", nargs="+", default=ARCHES, choices=ARCHES)
    parser.add_argument("--pass", nargs="+", dest="kinds", default=PASSES, choices=PASSES)
    parser.add_argument("--width", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--dim", nargs="+", type=int, default=DIMS, choices=DIMS)
    parser.add_argument("--variant", nargs="+", default=names, choices=names)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--plain", action="store_true", help="only those whose loop is judged")
    either.add_argument("--modified", action="store_true", help="only masks, bias and so on")
    parser.add_argument("--opcodes", action="store_true", help="of each steady loop, counted")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--budget", type=Path, default=BUDGET, help="in place of the repository's")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--write-budget", action="store_true", help="allow what is measured")
    either.add_argument("--compile-only", action="store_true", help="and judge nothing else")
    return parser.parse_args()


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is set: there is nothing to compile")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())

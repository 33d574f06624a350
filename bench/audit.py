"""Compile the GPU kernels ahead of time, without a GPU, and judge what the compiler made of them.

    python bench/audit.py [--arch sm_90 ...] [--dim 64 128] [--pass forward ...] [--width half]
                          [--modified | --plain] [--variant dense ...] [--opcodes] [-j 2]

Exits with 1 when a kernel breaks a rule; docs/performance.md says what the columns and rules are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from auditing.cases import ARCHES, DIMS, DTYPES, VARIANTS, Case, cases
from auditing.figures import Kernel, measure
from auditing.judging import violations

from flashwire_kernels.fused.config import PASSES

HEAD = (
    f"{'kernel':46} {'tile':17} {'regs':>4} {'spill':>5} {'shared':>6} {'mma':>4} {'exp':>4} "
    f"{'n/el':>6} {'ldg':>3} {'sts':>3} {'tensor':>6} {'exp':>5} {'issue':>6} {'TFLOP/s':>11} "
    f"{'s':>5}"
)


def main() -> int:
    chosen = _arguments()
    asked = list(_asked(chosen))
    print(HEAD)
    wrong: list[str] = []
    for kernels in _measured(asked, chosen.jobs):
        for kernel in kernels:
            if isinstance(kernel, str):
                wrong.append(kernel)
                continue
            print(_line(kernel), flush=True)
            if chosen.opcodes and kernel.loop is not None:
                ordered = sorted(kernel.loop.opcodes.items(), key=lambda item: -item[1])
                print("   ", *(f"{op}:{n}" for op, n in ordered))
            wrong += [f"{_name(kernel)}: {text}" for text in violations(kernel)]
    print(f"\n{len(asked)} cases, {len(wrong)} violations")
    print(*wrong, sep="\n")
    return bool(wrong)


def _name(kernel: Kernel) -> str:
    return str(kernel.case) if kernel.main else f"{kernel.case} {kernel.name}"


def _line(kernel: Kernel) -> str:
    line = (
        f"{_name(kernel):46} {kernel.shape:17} {kernel.registers:4} {kernel.spilled:5} "
        f"{kernel.shared:6}"
    )
    if kernel.loop is None:
        return f"{line} {'':63} {kernel.seconds:5.1f}"
    loop, b = kernel.loop, kernel.loop.bound
    return (
        f"{line} {loop.matrix:4} {loop.exponentials:4} {loop.per_score:6.2f} "
        f"{loop.opcodes.get('LDG', 0):3} {loop.opcodes.get('STS', 0):3} "
        f"{b.tensor:6.0f} {b.exponential:5.0f} {b.issue:6.0f} "
        f"{b.serial:5.0f} {b.parallel:5.0f} {kernel.seconds:5.1f}"
    )


def _measured(asked: list[Case], jobs: int) -> Iterator[list[Kernel | str]]:
    """In the order of `asked`, from so many processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_try, asked)


def _try(case: Case) -> list[Kernel | str]:
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        return list(measure(case))
    except Exception as error:  # whatever a compiler does not take is a finding
        return [f"{case}: does not compile: {type(error).__name__}: {error}"]


def _asked(chosen: argparse.Namespace) -> Iterator[Case]:
    for case in cases():
        modified = case.variant.modified
        if (
            case.arch in chosen.arch
            and case.kind in chosen.kinds
            and case.dim in chosen.dim
            and case.width in chosen.width
            and case.variant.name in chosen.variant
            and not (modified and chosen.plain)
            and not (chosen.modified and not modified)
        ):
            yield case


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(dict.fromkeys(v.name for v in VARIANTS))
    parser.add_argument("--arch", nargs="+", default=ARCHES, choices=ARCHES)
    parser.add_argument("--pass", nargs="+", dest="kinds", default=PASSES, choices=PASSES)
    parser.add_argument("--width", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--dim", nargs="+", type=int, default=DIMS, choices=DIMS)
    parser.add_argument("--variant", nargs="+", default=names, choices=names)
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--plain", action="store_true", help="no configurations for modified scores"
    )
    either.add_argument("--modified", action="store_true", help="no others")
    parser.add_argument("--opcodes", action="store_true", help="of each steady loop, by count")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

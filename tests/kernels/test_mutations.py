"""The suite would notice: each of these changes to a line of a kernel turns it red.

A test of the conformance suite runs in a process of its own, on a copy of the package with one
piece of text replaced.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import flashwire_kernels

PACKAGE = Path(flashwire_kernels.__file__).parent
TESTS = Path(__file__).parent
LENGTHS = "test_conformance.py::test_lengths"
HEADS = "test_conformance.py::test_shared_heads"
PAIRS = "test_conformance.py::test_every_pair_of_options"
DECODE = "test_fused.py::test_few_queries_share_out_their_keys"
EDGES = "test_tile_edges.py::test_every_distance"


class Mutation(NamedTuple):
    """`old` stands once in all kernels; `test` is to see `new` in its place."""

    old: str
    new: str
    test: str


SHORT = {
    "correction of the sum dropped": Mutation("l * correction", "l", LENGTHS),
    "window off by one": Mutation("shift - window.left", "shift - window.left + 1", PAIRS),
    "sum over a group forgotten": Mutation("range(GROUP)", "range(1)", HEADS),
    "dlse forgotten": Mutation("total -= tl.load(", "total -= 0 * tl.load(", LENGTHS),
    "last split ignored": Mutation("split < splits", "split < splits - 1", DECODE),
    "a key too many seen by all": Mutation(
        "first + shift + right + 1)", "first + shift + right + 2)", EDGES
    ),
}
LONG = {
    "correction of out dropped": Mutation("acc[c] * correction[:, None]", "acc[c]", LENGTHS),
    "right end off by one": Mutation("shift + window.right", "shift + window.right - 1", PAIRS),
    "a key too many before the others": Mutation("last - 1 + shift", "last - 2 + shift", EDGES),
    "last keys skipped": Mutation("last + shift + right)", "last + shift + right - 1)", EDGES),
    "alignments swapped": Mutation("if BOTTOM_RIGHT", "if not BOTTOM_RIGHT", PAIRS),
    "hidden p not made 0": Mutation("p = tl.where(visible, p, 0.0)", "pass", PAIRS),
    "rows that see nothing divided by 0": Mutation(
        "factor / tl.where(nothing, 1.0, l)", "factor / l", PAIRS
    ),
    "rows that have seen nothing subtracted": Mutation("if GUARD:", "if False:", PAIRS),
    "sink in the wrong unit": Mutation("in_units(sink, score.bias is not None)", "sink", PAIRS),
    "dropout four keys off": Mutation("first_j // 4 +", "first_j // 4 + 1 +", PAIRS),
    "factor of dropout forgotten in dv": Mutation("dv_tile * dropout.factor", "dv_tile", PAIRS),
    "factor of dropout forgotten in ds": Mutation("dp, 0.0) * dropout.factor", "dp, 0.0)", PAIRS),
    "descriptor a row off": Mutation("(first + start).to(", "(first + start + 1).to(", LENGTHS),
    "softcap without its derivative": Mutation("ds * steepness", "ds", PAIRS),
    "ALiBi from the wrong corner": Mutation("tl.abs(j - i - shift)", "tl.abs(j - i)", PAIRS),
    "scale of dk forgotten": Mutation("dk_tile * scale", "dk_tile", LENGTHS),
    "scale of dq forgotten": Mutation("dq_tile * scale", "dq_tile", LENGTHS),
}
NONE = Mutation("l * correction", "l * correction", LENGTHS)


def places(mutation):
    """The files of the kernels in which its text stands, each as often as it does."""
    kernels = (PACKAGE / "fused").glob("*.py")
    return [path for path in kernels for _ in range(path.read_text().count(mutation.old))]


def run(mutation, folder):
    """The test, on a changed copy of the package in `folder`, until it fails."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / places(mutation)[0].relative_to(PACKAGE)
    changed.write_text(changed.read_text().replace(mutation.old, mutation.new))
    pytest_arguments = ("-x", "-m", "not long", "-k", "triton or edges", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_arguments, str(TESTS / mutation.test)],
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize(
    "mutation", [pytest.param(m, id=name) for name, m in (SHORT | LONG).items()]
)
def test_its_text_stands_once(mutation):
    found = places(mutation)
    assert len(found) == 1, f"update the mutation: {mutation.old!r} stands in {found}"


@pytest.mark.parametrize(
    "mutation",
    [
        *(pytest.param(m, id=name) for name, m in SHORT.items()),
        *(pytest.param(m, id=name, marks=pytest.mark.long) for name, m in LONG.items()),
    ],
)
def test_it_turns_the_suite_red(mutation, tmp_path):
    done = run(mutation, tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "AssertionError: triton" in done.stdout, done.stdout


def test_a_copy_that_is_not_changed_stays_green(tmp_path):
    done = run(NONE, tmp_path)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr

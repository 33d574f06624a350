"""docs/security.md: each threat has a test, each test exists, and what it shows to copy works."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from flashwire_service import keys

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/security.md").read_text(encoding="utf-8")
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """The cells of each threat."""
    table = DOC[DOC.index("| threat |") :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [row for row in cells[2:] if not row[0].startswith("**")]


def test_each_threat_has_an_answer_and_a_test() -> None:
    assert len(rows()) > 30
    for threat, answer, tests in rows():
        assert answer, threat
        assert _NAMED.search(tests), threat
        assert not _NAMED.sub("", tests).strip(), threat


@pytest.mark.parametrize("path", sorted({path for path, _ in _NAMED.findall(DOC)}))
def test_each_named_test_exists(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    there = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    named = {test for file, test in _NAMED.findall(DOC) if file == path}
    assert named <= there


def test_the_example_of_a_file_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)
    path = tmp_path / "keys.toml"
    path.write_text(example)
    alice, ci, prometheus = keys.read(str(path))
    assert (alice.name, alice.may) == ("alice", keys.RIGHTS)
    assert ci.limits.max_body_bytes == 64 * 2**20
    assert prometheus.may == ("metrics",)


def test_every_word_of_a_file_is_explained() -> None:
    for word in ("key", "may", *keys.KeyLimits.__slots__):
        assert re.search(rf"^\| `{word}` \|", DOC, re.MULTILINE), word
    for right in keys.RIGHTS:
        assert f"`{right}`" in DOC


def test_the_command_makes_a_line_and_its_key(tmp_path: Path) -> None:
    (command,) = re.findall(r"^    (KEY=.*)$", DOC, re.MULTILINE)
    done = subprocess.run(
        ["sh", "-c", f'{command}; echo "$KEY" >&2'], check=True, capture_output=True, text=True
    )
    path = tmp_path / "keys.toml"
    path.write_text(done.stdout)
    (alice,) = keys.read(str(path))
    assert alice.digest == keys.digest_of(done.stderr.strip())

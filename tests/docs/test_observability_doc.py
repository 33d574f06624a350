"""docs/observability.md: every event that the code logs is in its table, and no other.

Metrics and their labels are held against a running service: tests/e2e/test_observability.py, alerts
against the documentation: tests/deploy/test_monitoring.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
LEVELS = ("debug", "info", "warning", "error")


def logged() -> set[str]:
    """The first argument of every call of a Log."""
    found = {"lines dropped", "request"}  # by the log itself; by a level that is chosen
    for path in (ROOT / "service/flashwire_service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return found


def documented() -> set[str]:
    table = DOC[DOC.index("| event | process |") :].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {event for row in rows for event in re.findall("`([^`]+)`", row)} | {"request"}


def test_every_event_is_documented_and_every_documented_one_is_there() -> None:
    assert logged() == documented()


def test_every_field_of_a_request_is_documented() -> None:
    table = DOC[DOC.index("| field | meaning |") :].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    told = {field for row in rows for field in re.findall(r"`(\w+)`", row)}
    source = (ROOT / "service/flashwire_service/front/answered.py").read_text(encoding="utf-8")
    line = source[source.index("def line(") :]
    named = set(re.findall(r'"(\w+)"(?=:|\])', line))
    assert told == named | {"trace_id"}

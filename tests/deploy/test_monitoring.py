"""The dashboard and the alerts: that they parse, and speak of metrics and labels that there are.

tests/e2e/test_observability.py holds docs/observability.md, which is the list here, against what a
running service says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy/grafana/flashwire.json").read_text(encoding="utf-8"))
(GROUP,) = yaml.safe_load((ROOT / "deploy/prometheus/flashwire.rules.yml").read_text("utf-8"))[
    "groups"
]
ALERTS: list[dict[str, Any]] = GROUP["rules"]
OF_PROMETHEUS = {"up": set[str]()}
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
GRAFANAS = {"$__rate_interval": "5m", "$job": "flashwire", "$instance": ".*"}
LE = {"_bucket": {"le"}}
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum")}


def samples() -> dict[str, set[str]]:
    """The labels of each name that can be asked for."""
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|([^|]*)\|", DOC, re.MULTILINE)
    return OF_PROMETHEUS | {
        name + suffix: set(re.findall(r"`(\w+)`", labels)) | LE.get(suffix, set())
        for name, kind, labels in rows
        for suffix in SUFFIXES.get(kind, ("",))
    }


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression of each query of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def plain(expression: str) -> str:
    """Without Grafana's variables."""
    for variable, given in GRAFANAS.items():
        expression = expression.replace(variable, given)
    assert "$" not in expression
    return expression


def selectors(expression: str) -> list[Any]:
    """What an expression selects; ValueError when it is none."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def labels_named(expression: str) -> set[str]:
    """Labels that are grouped or joined by."""
    groups = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    return {label.strip() for group in groups for label in group.split(",")}


def check(expression: str) -> set[str]:
    """That it parses, and that its names and labels are there. Returns the labels of its result
    at most.
    """
    known, found = samples(), selectors(expression)
    assert found
    there = set(SCRAPED)
    for selector in found:
        assert selector.name in known, selector.name
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= known[selector.name] | SCRAPED, (selector.name, matched)
        there |= known[selector.name]
    assert labels_named(expression) <= there, expression
    return there


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_can_be_evaluated_and_says_what_to_do(alert: dict[str, Any]) -> None:
    there = check(alert["expr"])
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert re.fullmatch(r"\d+[mh]", alert.get("for", "0m"))
    for text in (alert["annotations"]["summary"], alert["annotations"]["description"]):
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= there, text
        assert text.count("{{") == text.count("}}")


@pytest.mark.parametrize(("title", "expression"), list(panels()))
def test_a_query_of_the_dashboard_can_be_evaluated(title: str, expression: str) -> None:
    check(plain(expression))
    for selector in selectors(plain(expression)):
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched >= SCRAPED, f"{title}: not only of the chosen instances"


def test_legends_name_labels_that_are_there() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= check(plain(target["expr"])), panel["title"]


def test_the_dashboard_can_be_imported_anywhere() -> None:
    """No address of a data source in it, and no two panels in one place."""
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}", "flashwire"}
    identities = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identities)) == len(identities)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not mine & cells, panel["title"]
        cells |= mine


def test_everything_counted_is_looked_at_somewhere() -> None:
    """A metric that is on no panel and in no alert is one that nobody will see."""
    asked = " ".join([*(alert["expr"] for alert in ALERTS), *(query for _, query in panels())])
    names = {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples()} - set(OF_PROMETHEUS)
    unseen = {name for name in names if not re.search(rf"\b{name}(_bucket|_count|_sum)?\b", asked)}
    assert unseen == {"flashwire_uploads", "flashwire_residuals"}  # their bytes are


def test_the_alerts_are_documented() -> None:
    rows = re.findall(r"^\| (Flashwire\w+) \| (\w+) \|", DOC, re.MULTILINE)
    assert rows == [(alert["alert"], alert["labels"]["severity"]) for alert in ALERTS]


def test_a_wrong_name_or_label_would_be_found() -> None:
    for wrong in (
        "flashwire_worker_ups == 0",
        "sum by (wroker) (flashwire_worker_up)",
        'flashwire_worker_up{cause="x"}',
        "rate(flashwire_connections[5m]",
    ):
        with pytest.raises((AssertionError, ValueError)):
            check(wrong)

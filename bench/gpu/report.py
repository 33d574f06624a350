"""What was found, as tables to read and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu.items import ERROR, FAIL, MINE, MISSED, PASS, PEERS, SKIPPED, Row

BARS = (
    ("forward, d128, 16k, dense: TFLOP/s", "speed", "d128 L16384 dense", "forward", 600, 475),
    ("forward, d128, 16k, causal: TFLOP/s", "speed", "d128 L16384 causal", "forward", 600, 475),
    ("backward, d128, 16k, dense: TFLOP/s", "speed", "d128 L16384 dense", "backward", 400, 320),
    ("backward, d128, 16k, causal: TFLOP/s", "speed", "d128 L16384 causal", "backward", 400, 320),
    ("decode, batch 64, 16k keys: % of copy", "decode", "batch 64 keys 16384", "of_copy", 80, 60),
)
"""(what, part, item, figure, bar, floor), for an H200."""

Parts = dict[str, list[Row]]


def bars(parts: Parts) -> list[dict[str, Any]]:
    """Each bar of the parts that ran, with what was measured, and the verdict."""
    found = []
    for what, part, item, figure, bar, floor in BARS:
        if part not in parts:
            continue
        rows = [r for r in parts[part] if r["item"] == item and r["status"] == PASS]
        got, verdict = None, "not measured"
        if rows:
            got = 100 * rows[0]["of_copy"] if part == "decode" else rows[0][figure]["tflops"][MINE]
            verdict = "pass" if got >= bar else "above the floor" if got >= floor else "FAIL"
        found.append({"what": what, "got": got, "bar": bar, "floor": floor, "verdict": verdict})
    return found


def conformance(rows: Sequence[Row]) -> list[str]:
    """How many of each, what failed and why, and how much of the budget was spent."""
    counts = Counter(row["status"] for row in rows)
    lines = [f"conformance with the float64 reference: {_counted(counts)} of {len(rows)}"]
    for row in rows:
        if row["status"] in (FAIL, ERROR):
            lines.append(f"  {row['status'].upper()} {row['item']}: {row.get('error', '')[:400]}")
        elif row["status"] == SKIPPED:
            lines.append(f"  skipped {row['item']}: {row['why']}")
    spent = [(v, n, row["item"]) for row in rows for n, v in row.get("of_budget", {}).items()]
    if spent:
        most, name, item = max(spent)
        lines.append(f"  most of a budget that was spent: {most:.0%}, by {name} of {item}")
    return lines


def compilation(rows: Sequence[Row]) -> list[str]:
    """How long it took, and what did not compile."""
    seconds = sum(row["seconds"] for row in rows)
    return [f"compiled ahead: {len(rows)} kinds of calls, {seconds:.0f} s in all", *_others(rows)]


def speed(rows: Sequence[Row]) -> list[str]:
    """TFLOP/s of forward and backward, and how many times as fast as each peer."""
    columns = "".join(f"{f'/{peer}':>8}" for peer in PEERS)
    lines = [
        "bf16, 16k tokens, hidden size 2048: TFLOP/s, and as a multiple of each peer's",
        f"{'':22}{'forward':>8}{columns}{'backward':>10}{columns}{'W':>7}{'MHz':>6}",
    ]
    measured = [row for row in rows if row["status"] == PASS]
    for row in sorted(measured, key=lambda r: (r["dim"], r["causal"], r["length"])):
        cells = [f"{row['item']:22}"]
        for kind, width in (("forward", 8), ("backward", 10)):
            cells.append(f"{row[kind]['tflops'][MINE]:{width}.1f}")
            cells += [_ratio(row[kind]["ratio"].get(peer)) for peer in PEERS]
        cells.append(_reading(row, "power.draw", 7) + _reading(row, "clocks.sm", 6))
        lines.append("".join(cells))
    return lines + _others(rows)


def decode(rows: Sequence[Row]) -> list[str]:
    """GB/s and how much that is of a copy's."""
    lines = [
        "decode, bf16, d128, 64 query heads over 8 key heads: GB/s of q, k, v and out",
        f"{'':24}{'GB/s':>8}{'copy':>8}{'of copy':>9}{'/flash':>8}{'us':>9}{'W':>7}{'MHz':>6}",
    ]
    measured = [row for row in rows if row["status"] == PASS]
    measured.sort(key=lambda row: (row["length"], row["batch"]))
    return lines + [_decode_line(row) for row in measured] + _others(rows)


def _decode_line(row: Row) -> str:
    return (
        f"{row['item']:24}{row['gb_per_s']:8.0f}{row['copy_gb_per_s']:8.0f}{row['of_copy']:9.0%}"
        f"{_ratio(row['ratio'].get('flash'))}{1e3 * row['ms'][MINE]:9.1f}"
        f"{_reading(row, 'power.draw', 7)}{_reading(row, 'clocks.sm', 6)}"
    )


def summary(parts: Parts, facts: dict[str, Any], seconds: float) -> list[str]:
    """The short table that stands last."""
    lines = [f"{facts.get('device', 'no device')}, {facts.get('date')}, {seconds:.0f} s"]
    lines.append(", ".join(f"{n} {facts[n]}" for n in ("torch", "triton", "driver") if n in facts))
    if "conformance" in parts:
        lines.append(conformance(parts["conformance"])[0])
    judged = bars(parts)
    if facts.get("dry_run"):
        lines.append("a dry run: no time or rate here means anything")
    elif judged and "H200" not in facts.get("device", ""):
        lines.append("the bars are an H200's; this is another device")
    for bar in judged:
        got = "" if bar["got"] is None else f"{bar['got']:.1f}"
        wanted = f"bar {bar['bar']}  floor {bar['floor']}"
        lines.append(f"{bar['what']:40} {got:>7}  {wanted}  {bar['verdict']}")
    return lines


def exit_code(parts: Parts) -> int:
    """1 where a result is wrong, or none came; 2 where some were not reached."""
    statuses = {row["status"] for row in parts.get("conformance", [])}
    if statuses & {FAIL, ERROR} or any(not rows for rows in parts.values()):
        return 1
    return 2 if MISSED in statuses else 0


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {status}" for status, n in counts.most_common())


def _others(rows: Sequence[Row]) -> list[str]:
    """Rows that were not measured, and peers that were not there: each reason once."""
    lines = []
    for row in rows:
        if row["status"] != PASS:
            why = row.get("error") or row.get("why") or "no time was left"
            lines.append(f"  {row['status']} {row['item']}: {why[:300]}")
    absent: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer, why in row.get("absent", {}).items():
            absent.setdefault((peer, why), []).append(row["item"])
    for (peer, why), items in absent.items():
        shown = ", ".join(items[:3]) + (", ..." if len(items) > 3 else "")
        lines.append(f"  no {peer} for {shown}: {why}")
    return lines


def _ratio(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:7.2f}x"


def _reading(row: Row, name: str, width: int) -> str:
    value = row["readings"].get(name)
    return f"{value:{width}.0f}" if isinstance(value, float) else f"{'-':>{width}}"

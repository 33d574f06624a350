"""Times the candidates of each key beside the shipped configuration, and chooses."""

from __future__ import annotations

import dataclasses
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashwire_kernels.fused.config import Config, Key
from gpu.items import PASS, SKIPPED, Item, Row
from gpu.place import Place, Run, interleaved, ratio
from gpu.trials import Results, Trial, keys, launch, shapes, tried
from gpu.tune_compile import architecture, config_text, item_name, key_name

_WORTHWHILE = 1.01
"""How many times as fast as the shipped one another must be."""

_AT_ONCE = 10
"""Candidates timed, the most promising by prediction."""

_UNITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""What results may differ by, relative to the largest: the sums are the same but for their order,
p of 16 bits is rounded before it is summed, and float32 errs by many of its own roundings.
"""


def items(place: Place, options: dict[str, Any]) -> list[Item]:
    """A row per key. options["compiled"] is a file of tune_compile's rows."""
    rows: list[Row] = json.loads(Path(options["compiled"]).read_text())
    compiled = {row["item"]: row for row in rows}
    found = keys(architecture(place), options)
    seconds = 0.7 * options["seconds"] / max(1, len(found))

    def item(key: Key) -> Item:
        of_key = {c: compiled[item_name(key, c)] for c in tried(key, options["most"])}
        return Item(key_name(key), partial(_tune, key, of_key, seconds))

    return [item(key) for key in found]


def _tune(key: Key, compiled: dict[Config, Row], seconds: float, place: Place) -> Row:
    shipped = next(iter(compiled))
    row: Row = {"key": list(key), "shipped": dataclasses.asdict(shipped)}
    chosen, left_out = _promising(shipped, compiled)
    if len(chosen) < 2:
        why = "no other is left to time"
        return row | {"status": SKIPPED, "why": why, "left_out": left_out}
    judged = shapes(key, place.dry)
    gains: dict[Config, list[float]] = {c: [] for c in chosen}
    times: dict[Config, list[float]] = {c: [] for c in chosen}
    for shape in judged:
        runs = _agreeing(Trial(key, shape, place), list(gains), left_out, place)
        found = interleaved(place, runs, seconds / len(judged))
        gains = {c: gained for c, gained in gains.items() if config_text(c) in runs}
        for c, gained in gains.items():
            gained.append(ratio(found[config_text(c)], found[config_text(shipped)]))
            times[c].append(statistics.median(found[config_text(c)]))
    means = {c: statistics.geometric_mean(gained) for c, gained in gains.items()}
    fastest = max(means, key=lambda c: means[c])
    best = fastest if means[fastest] >= _WORTHWHILE else shipped
    tried_of = [
        {"text": config_text(c), "gain": means[c], "ms": times[c]}
        | {n: compiled[c].get(n) for n in ("predicted", "registers", "spilled", "shared")}
        for c in sorted(means, key=lambda c: -means[c])
    ]
    return row | {
        "status": PASS, "best": dataclasses.asdict(best), "gain": means[best],
        "shapes": [shape.name for shape in judged], "tried": tried_of, "left_out": left_out,
    }  # fmt: skip


def _promising(shipped: Config, compiled: dict[Config, Row]) -> tuple[list[Config], list[Row]]:
    """The shipped one and those to time beside it; and why the others are not timed."""
    able, left_out = [], []
    own = compiled[shipped]
    for c, row in compiled.items():
        why = ""
        if row["status"] != PASS:
            why = row.get("error", row["status"])[:200]
        elif (row.get("spilled") or 0) > (own.get("spilled") or 0):
            why = f"spills {row['spilled']} bytes"
        if why:
            left_out.append({"text": config_text(c), "why": why})
        elif c != shipped:
            able.append(c)
    able.sort(key=lambda c: -compiled[c].get("predicted", {}).get("serial", 0.0))
    left_out += [{"text": config_text(c), "why": "less promising"} for c in able[_AT_ONCE:]]
    return ([shipped, *able[:_AT_ONCE]] if own["status"] == PASS else []), left_out


def _agreeing(
    trial: Trial, chosen: list[Config], left_out: list[Row], place: Place
) -> dict[str, Run]:
    """Runs of those that give what the first, the shipped one, gives; why the others do not."""
    runs: dict[str, Run] = {}
    wanted: Results = {}
    for c in chosen:
        try:
            calls, results = trial.prepare(c)
            launch(calls)
            place.synchronise()
        except Exception as raised:
            if not runs:
                raise
            why = f"{type(raised).__name__}: {raised}"[:200]
        else:
            wanted = wanted or results
            why = _difference(results, wanted)
        if why:
            left_out.append({"text": config_text(c), "why": why})
        else:
            runs[config_text(c)] = partial(launch, calls)
    return runs


def _difference(some: Results, others: Results) -> str:
    """How results differ by more than another order of summation makes them; nothing if not."""
    for name, t in some.items():
        want = others[name].double()
        off = float((t.double() - want).abs().max() / want.abs().max())
        unit = _UNITS[t.dtype]
        if not off <= 4 * unit:
            return f"{name} differs from the shipped one's by {off:.2g} of the largest"
    return ""

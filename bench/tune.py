"""Find the fastest launch configurations on this GPU, and write them into the shipped tables.

    python bench/tune.py [--pass forward ...] [--dim 64 128] [--width half] [--plain | --modified]
                         [--minutes N] [--out DIR] [--write DIR] [--dry-run]

Compiles the candidates of fused/candidates.py in several processes, leaves out those that do not
compile, spill more than the shipped one or give other values, and times the rest beside it. Prints
what was predicted from machine code and what was got. A dry run does it interpreted, on tiny
shapes, and must be given a folder to write to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from gpu import tables
from gpu.items import PASS, Row
from gpu.runner import NO_DEVICE, NoDevice, Order, about, log_end, run

_SIZES = {"half": 2, "single": 4}

_COLUMNS = (
    ("", 26), ("gain", 7), ("ms", 20), ("predicted TFLOP/s", 20), ("regs", 6), ("spill", 6),
    ("shared", 8),
)  # fmt: skip

say = partial(print, flush=True)


def main() -> int:
    chosen = _arguments()
    if chosen.dry_run and chosen.write is None:
        say("a dry run has no figures for the shipped tables: name a folder by --write")
        return 2
    seconds = 60 * (chosen.minutes or (30 if chosen.dry_run else 8))
    options: dict[str, Any] = {
        "passes": chosen.kinds,
        "dims": chosen.dim,
        "item_sizes": [_SIZES[width] for width in chosen.width],
        "modified": [
            m for m, other in ((False, chosen.modified), (True, chosen.plain)) if not other
        ],
        "most": 2 if chosen.dry_run else None,
    }
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows, facts = tune(Path(scratch), options, seconds, chosen.dry_run)
        except NoDevice:
            say("there is no CUDA or ROCm device: see --dry-run")
            return NO_DEVICE
    return tell(rows, facts, chosen.out, chosen.write or tables.SHIPPED)


def tune(
    folder: Path, options: dict[str, Any], seconds: float, dry: bool
) -> tuple[list[Row], dict[str, Any]]:
    """A row per key, and facts of the device. Raises NoDevice."""
    began = time.monotonic()
    order = partial(Order, dry=dry, grace=60.0 if dry else 20.0)
    children = 2 if dry else os.cpu_count() or 2
    say(f"compiling: at most {0.6 * seconds:.0f} s")
    compiled = run(
        order(part="tune-compile", folder=folder / "compiled", children=children,
              seconds=0.6 * seconds - 20, options=options),
        say,
    )  # fmt: skip
    (folder / "compiled.json").write_text(json.dumps(compiled))
    left = seconds - (time.monotonic() - began)
    say(f"{sum(row['status'] == PASS for row in compiled)} of {len(compiled)} compiled; "
        f"timing: at most {left:.0f} s")  # fmt: skip
    options = options | {"compiled": str(folder / "compiled.json"), "seconds": left - 20}
    rows = run(
        order(part="tune", folder=folder / "timed", children=1, seconds=left - 20, options=options),
        say,
    )
    if not rows:
        say(log_end(folder / "timed"))
    return rows, about(folder / "timed").get("facts", {})


def tell(rows: list[Row], facts: dict[str, Any], out: Path | None, target: Path) -> int:
    """Print what was found, and write it; 1 where a key could not be tuned for an error."""
    for row in rows:
        say("\n".join(_lines(row)))
    tuned = [row for row in rows if row["status"] == PASS]
    changed = sum(row["best"] != row["shipped"] for row in tuned)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tune.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
    written = tables.rewrite([(row["key"], row["best"]) for row in tuned], target)
    say(f"\n{facts.get('device', 'no device')}: {changed} of {len(rows)} configurations changed")
    say("\n".join(f"wrote {file}" for file in written) or "nothing to write")
    return int(any(row["status"] == "error" for row in rows))


def _lines(row: Row) -> list[str]:
    """A key, and each candidate by what was got of it."""
    left_out = [f"  {other['text']:24} {other['why']}" for other in row.get("left_out", ())]
    if row["status"] != PASS:
        why = row.get("why") or row.get("error") or "no time was left"
        return [f"\n{row['item']}: {row['status']}, {why}", *left_out]
    head = "".join(f"{name:>{width}}" for name, width in _COLUMNS)
    lines = [f"\n{row['item']}: {', '.join(row['shapes'])}", head]
    for tried in row["tried"]:
        p = tried["predicted"]
        predicted = f"{p['serial']:.0f} to {p['parallel']:.0f}" if p else "-"
        ms = " ".join(f"{t:.3f}" for t in tried["ms"])
        marks = "".join(
            f"{'-' if tried[name] is None else tried[name]:>{width}}"
            for name, width in (("registers", 6), ("spilled", 6), ("shared", 8))
        )
        lines.append(f"  {tried['text']:24}{tried['gain']:6.3f}x{ms:>20}{predicted:>20}{marks}")
    return lines + left_out


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pass", nargs="+", dest="kinds", default=tables.PASSES, choices=tables.PASSES
    )
    parser.add_argument(
        "--dim", nargs="+", type=int, default=[64, 128, 256], choices=(64, 128, 256)
    )
    parser.add_argument("--width", nargs="+", default=list(_SIZES), choices=list(_SIZES))
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--plain", action="store_true", help="no modified scores")
    either.add_argument("--modified", action="store_true", help="no others")
    parser.add_argument("--minutes", type=float, help="how long all of it may take (default 8)")
    parser.add_argument("--out", type=Path, help="folder for tune.json, with everything tried")
    parser.add_argument("--write", type=Path, help="folder for the tables, not the shipped one")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, interpreted")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

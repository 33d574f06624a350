"""Is it right on this GPU, and how fast is it?

    python bench/gpu_check.py [--out DIR] [--only PART] [--minutes N] [--dry-run]

Needs torch, triton and numpy. Checks results against the float64 reference, then measures forward
and backward beside PyTorch's kernels, and decoding beside a copy. Prints a short table last; with
--out, writes everything to DIR/gpu_check.json. A dry run does all of it on the CPU, on tiny shapes
with the kernels interpreted, and measures nothing that means anything.

Ends with 0; 1 when a result is wrong; 2 when the time was too short to check all; 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from gpu import report
from gpu.items import Row
from gpu.runner import NO_DEVICE, NoDevice, Order, about, log_end, run

PARTS = ("conformance", "speed", "decode")
SHARES = {"conformance": 0.5, "speed": 0.36, "decode": 0.1}
"""Of the time there is."""

say = partial(print, flush=True)


def check(folder: Path, wanted: list[str], seconds: float, dry: bool) -> report.Parts:
    """The rows of each part. Raises NoDevice."""
    measured = [part for part in wanted if part != "conformance"]
    prepared = SHARES["conformance"] if "conformance" in wanted else 0.2
    seconds /= prepared + sum(SHARES[part] for part in measured)
    parts: report.Parts = {}

    def order(part: str, children: int, share: float, **options: object) -> Order:
        allowed = share * seconds
        say(f"{part}: at most {allowed:.0f} s")
        grace = 60 if dry else 0.1 * allowed + 5
        return Order(part=part, folder=folder / part, children=children, seconds=0.9 * allowed,
                     grace=grace, dry=dry, options=options)  # fmt: skip

    # Nothing is timed meanwhile, so that kernels can be compiled beside.
    cores = 2 if dry else os.cpu_count() or 2
    jobs = []
    if "conformance" in wanted:
        jobs.append(order("conformance", cores, prepared))
    if measured:
        jobs.append(order("compile", max(1, cores // 3), prepared, parts=measured))
    with ThreadPoolExecutor() as pool:
        for job, rows in zip(jobs, pool.map(lambda job: run(job, say), jobs), strict=True):
            parts[job.part] = rows
    for part in measured:
        allowed = 0.9 * SHARES[part] * seconds
        parts[part] = run(order(part, 1, SHARES[part], seconds=allowed), say)
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--minutes", type=float, help="how long all of it may take (default 5.5)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, interpreted")
    chosen = parser.parse_args()
    minutes = chosen.minutes or (30 if chosen.dry_run else 5.5)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if chosen.out is not None:
            folder = chosen.out / datetime.now(UTC).strftime("parts-%Y%m%d-%H%M%S")
        try:
            parts = check(folder, chosen.only or list(PARTS), 60 * minutes, chosen.dry_run)
        except NoDevice:
            say("there is no CUDA or ROCm device: see --dry-run")
            return NO_DEVICE
        facts: dict[str, object] = next(
            (f for p in parts if (f := about(folder / p).get("facts"))), {}
        )
        return tell(parts, facts, time.monotonic() - began, chosen.out, folder)


def tell(
    parts: dict[str, list[Row]], facts: dict[str, object], seconds: float, out: Path | None,
    folder: Path,
) -> int:  # fmt: skip
    """Print the tables and write the JSON; the exit status."""
    facts |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    tables = {
        "conformance": report.conformance, "compile": report.compilation,
        "speed": report.speed, "decode": report.decode,
    }  # fmt: skip
    for part, rows in parts.items():
        say("")
        if not rows:
            say(f"{part}: no process got so far as to begin; the end of its log:")
            say(log_end(folder / part))
        else:
            say("\n".join(tables[part](rows)))
    code = report.exit_code(parts)
    if out is not None:
        written = {"facts": facts, "seconds": seconds, "exit": code, "bars": report.bars(parts)}
        (out / "gpu_check.json").write_text(json.dumps(written | parts, indent=1))
    say("\n" + "\n".join(report.summary(parts, facts, seconds)))
    return code


if __name__ == "__main__":
    sys.exit(main())

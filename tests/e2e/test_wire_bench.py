"""A smoke test of bench/wire.py. What it measures is for a quiet hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_quick() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "wire.py", "--quick"], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for row in (
        "768 KiB: 786,432 bytes up",
        "raw unix socket",
        "plain service",
        "flashwire, shared",
    ):
        assert row in done.stdout
    tiny = [line for line in done.stdout.splitlines() if line.startswith("tiny: p50")]
    assert tiny[0].endswith(("pass", "FAIL"))

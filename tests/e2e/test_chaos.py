"""A short run of bench/chaos.py and of bench/soak.py. Their long ones are for a quiet hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def run(script: str, *arguments: str) -> str:
    """What it prints; it must find no violation."""
    done = subprocess.run(
        [sys.executable, BENCH / script, *arguments], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_chaos() -> None:
    """Each disturbance at least once, however long that takes."""
    said = run("chaos.py", "--seconds", "0", "--every", "0.3", "--users", "3", "--cover", "1",
               "--tolerance", "0.5")  # fmt: skip
    assert "0 wrong, 0 hung, 0 status 500" in said
    for disturbance in ("front stopped", "front killed", "worker stopped", "worker killed",
                        "worker short of memory", "worker short of descriptors"):  # fmt: skip
        assert f"\n{disturbance}  " in said


def test_soak() -> None:
    """Too short for memory to be judged closely; descriptors, threads and answers are."""
    said = run("soak.py", "--seconds", "3", "--warm", "1", "--users", "3", "--tolerance", "0.5")
    assert "VIOLATION" not in said
    assert "by residual" in said

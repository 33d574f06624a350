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
    said = run("chaos.py", "--seconds", "9", "--every", "0.7", "--users", "6", "--cover", "1",
               "--tolerance", "0.5")  # fmt: skip
    assert "0 wrong, 0 hung, 0 status 500" in said
    for disturbance in (
        "worker killed",
        "worker stopped",
        "front killed",
        "worker short of memory",
    ):
        assert disturbance in said


def test_soak() -> None:
    """Too short for memory to be judged closely; descriptors, threads and answers are."""
    said = run("soak.py", "--seconds", "8", "--warm", "3", "--users", "6", "--tolerance", "0.5")
    assert "VIOLATION" not in said
    assert "by residual" in said

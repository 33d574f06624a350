"""The scripts of examples/ as a person runs them, shortened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, timeout: float = 120) -> tuple[int, str]:
    """(exit status, what it printed)."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def apart(said: str) -> float:
    found = re.search(r"apart by at most (\S+) in", said)
    assert found, said
    return float(found[1])


def test_training_stays_together(tmp_path: Path) -> None:
    """A server of its own: what others left on a shared one would count."""
    plot = tmp_path / "loss.png"
    status, said = run("train_remote", "--device", "cpu", "--steps", "5", "--plot", str(plot))
    assert status == 0, said
    assert apart(said) < 1e-4
    assert "kept on the server for backward: 0 bytes" in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    losses = re.findall(r"loss (\S+) -> (\S+)", said)
    assert len(losses) == 2
    assert all(float(last) < float(first) - 0.2 for first, last in losses)


@pytest.mark.long
def test_a_hundred_steps_stay_together(tmp_path: Path) -> None:
    plot = str(tmp_path / "loss.png")
    for backend in ("cpu", "reference"):
        arguments = ("--device", "cpu", "--plot", plot, "--backend", backend)
        status, said = run("train_remote", *arguments, timeout=600)
        assert status == 0, said
        assert (apart(said) > 0) == (backend == "reference")
        assert apart(said) < 1e-4


@pytest.mark.long
def test_losses_that_part_are_reported(server: Any, tmp_path: Path) -> None:
    plot = str(tmp_path / "loss.png")
    arguments = ("--url", server.url, "--steps", "1", "--tolerance", "0", "--plot", plot)
    status, said = run("train_remote", *arguments)
    assert status == 1, said
    assert "not the same" in said


def test_models_of_transformers_agree(server: Any) -> None:
    status, said = run("transformers_remote", "--url", server.url)
    assert status == 0, said
    assert "embeddings: off by" in said
    words = re.findall(r"^(?:local|remote) +(\d+(?: \d+){23})$", said, re.MULTILINE)
    assert len(words) == 2
    assert words[0] == words[1]


def test_a_kernel_is_checked_and_a_mistake_is_caught(server: Any) -> None:
    status, said = run("check_my_kernel", "--url", server.url)
    assert status == 0, said
    right, wrong = said.split("without rescaling:")
    assert "mine against reference: within budget" in right
    assert "mine against reference: over budget" in wrong
    assert re.search(r"^worst: \w+\[\d+(, \d+)*\] is \S+, and should be \S+:", wrong, re.MULTILINE)
    assert "its mistake is caught" in wrong


def test_a_server_that_is_not_there_is_reported() -> None:
    status, said = run("check_my_kernel", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert "ConnectionLost" in said
    assert "Traceback" not in said

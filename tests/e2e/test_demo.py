"""`make demo` as a person runs it: its exit status, its words, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = EXAMPLES / "data" / "minilm_attention.npz"


class Demo:
    """A running demo, leader of a process group that its service belongs to."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, EXAMPLES / "demo.py", "--device", "cpu", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str]:
        """(exit status, what it printed)."""
        said, _ = self.process.communicate(timeout=120)
        return self.process.returncode, said

    def service_has_processes(self) -> bool:
        """Whether the supervisor, its child, has started children of its own."""
        supervisors = _children(self.process.pid)
        return any(_children(pid) for pid in supervisors)

    def leaves_something(self) -> bool:
        """Whether a process of its group outlives it. The kernel may need a moment to bury them."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        self.process.kill()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    except FileNotFoundError:
        return []


def table_rows(said: str) -> list[list[str]]:
    """The rows of the table: layer, against, worst, error, budget, verdict, backend, device, ms."""
    rows = [line.split() for line in said.splitlines()]
    return [row for row in rows if len(row) == 10 and row[0].isdigit()]


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.kill()


def test_every_layer_is_within_budget(demos: list[Demo]) -> None:
    demos.append(demo := Demo())
    status, said = demo.finish()
    assert status == 0, said
    assert "All 6 layers within budget" in said
    assert "compute ms" in said
    assert "trip ms" in said
    for words in ("against the model's own", "autograd in float64", "the worst of dq, dk and dv"):
        assert words in said
    rows = table_rows(said)
    assert [int(row[0]) for row in rows] == [layer for layer in range(6) for _ in range(3)]
    assert {tuple(row[1:3]) for row in rows} >= {("model", "out")}
    assert {row[5] for row in rows} == {"ok"}
    assert {tuple(row[6:8]) for row in rows} == {("cpu", "cpu")}
    assert not demo.leaves_something()


def test_an_output_that_is_not_the_models_fails_it(demos: list[Demo], tmp_path: Path) -> None:
    with np.load(DATA) as file:
        data = dict(file)
    value = data["out"][3, 5, 7, 11]
    data["out"][3, 5, 7, 11] = value + 2 * np.spacing(value)  # two units in its last place
    np.savez(tmp_path / "tampered.npz", **data)
    demos.append(demo := Demo("--data", str(tmp_path / "tampered.npz")))
    status, said = demo.finish()
    assert status == 1, said
    assert [row[:3] for row in table_rows(said) if row[5] != "ok"] == [["3", "model", "out"]]
    assert "1 of 18 checks over budget" in said
    assert not demo.leaves_something()


@pytest.mark.parametrize("ctrl_c", [True, False], ids=["ctrl-c", "sigterm"])
def test_interrupted_it_takes_its_service_along(demos: list[Demo], ctrl_c: bool) -> None:
    demos.append(demo := Demo())
    end = time.monotonic() + 60
    while not demo.service_has_processes():
        assert time.monotonic() < end
        assert demo.process.poll() is None
        time.sleep(0.02)
    if ctrl_c:  # a terminal signals the whole group
        os.killpg(demo.process.pid, signal.SIGINT)
    else:
        demo.process.terminate()
    status, said = demo.finish()
    assert status == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not demo.leaves_something()


def test_a_service_that_cannot_start_is_reported(demos: list[Demo]) -> None:
    demos.append(demo := Demo("--device", "cuda:99"))
    status, said = demo.finish()
    assert status == 1
    assert "the service ended with status" in said
    assert "cuda:99" in said
    assert "Traceback" not in said
    assert not demo.leaves_something()


def test_data_that_is_none_is_reported(demos: list[Demo], tmp_path: Path) -> None:
    (tmp_path / "torn.npz").write_bytes(DATA.read_bytes()[:1000])
    demos.append(demo := Demo("--data", str(tmp_path / "torn.npz")))
    status, said = demo.finish()
    assert status == 1
    assert "cannot read" in said
    assert "Traceback" not in said

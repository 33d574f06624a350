"""Runs the items of a part in child processes, so that what breaks one costs no other.

A child claims an item by making a file of its number, which only one can; what it found it appends
to a file of its own. One that a kernel has broken ends, and another takes up what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.items import ERROR, MISSED, Row

NO_DEVICE, BROKEN = 3, 4
"""How a child ends that found no GPU, or whose device no longer answers."""

_CHILD = "gpu.child"
_RESTARTS = 5
_BENCH = Path(__file__).resolve().parents[1]
_KERNELS = _BENCH.parent / "kernels"


class NoDevice(Exception):
    """There is no GPU here."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A part to run.

    part      a name of child.PARTS
    folder    an empty one of the part's own
    children  how many processes
    seconds   after which no further item is begun
    grace     seconds more for those that were
    options   what the part needs to know, as JSON
    """

    part: str
    folder: Path
    children: int
    seconds: float
    grace: float
    dry: bool
    options: dict[str, Any] = field(default_factory=dict)


def run(order: Order, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """The rows of every item, in their order. Raises NoDevice."""
    order.folder.mkdir(parents=True)
    crew = _Crew(order, say)
    try:
        while crew.children:
            time.sleep(0.05)
            crew.look_after()
    finally:
        crew.end()
    return _collect(order.folder, crew.lost)


class _Crew:
    """The processes of a part; lost are the rows of items that these had begun, and never ended."""

    def __init__(self, order: Order, say: Callable[[str], None]) -> None:
        self.order, self.say = order, say
        self.lost: list[Row] = []
        self._restarts: Counter[int] = Counter()
        self._until = time.monotonic() + order.seconds
        self.children = {n: _start(order, n, order.seconds) for n in range(order.children)}

    def look_after(self) -> None:
        """End who takes too long; replace who has ended before it should. Raises NoDevice."""
        late = time.monotonic() > self._until + self.order.grace
        for number, child in list(self.children.items()):
            if late:
                child.kill()
                child.wait()
            status = child.poll()
            if status is None:
                continue
            del self.children[number]
            if status == NO_DEVICE:
                raise NoDevice
            if status == -signal.SIGINT:
                raise KeyboardInterrupt
            if status:
                self._replace(number, child.pid, _ending(status))

    def _replace(self, number: int, pid: int, ending: str) -> None:
        self.say(f"{self.order.part}: a process {ending}")
        claimed, done = _claimed(self.order.folder, pid), _done(self.order.folder)
        lost = {"status": ERROR, "error": f"its process {ending}"}
        self.lost += [lost | {"index": index} for index in claimed - done]
        left = self._until - time.monotonic()
        if claimed and left > 0 and self._restarts[number] < _RESTARTS:
            self._restarts[number] += 1
            self.children[number] = _start(self.order, number, left)

    def end(self) -> None:
        """End all that still run."""
        for child in self.children.values():
            child.kill()
            child.wait()


def claim(folder: Path, index: int) -> bool:
    """Whether item `index` is this process's own now."""
    try:
        file = os.open(folder / f"claim-{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with open(file, "w") as claimed:
        claimed.write(str(os.getpid()))
    return True


def write_row(folder: Path, row: Row) -> None:
    """Append to this process's rows."""
    with open(folder / f"rows-{os.getpid()}.jsonl", "a") as rows:
        rows.write(json.dumps(row) + "\n")


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Names of all items, and facts: as told by whichever process comes first."""
    mine = folder / f"about-{os.getpid()}"
    mine.write_text(json.dumps(about))
    with contextlib.suppress(FileExistsError):
        os.link(mine, folder / "about.json")
    mine.unlink()


def about(folder: Path) -> dict[str, Any]:
    """What a part that has run was about; empty where no process came so far."""
    file = folder / "about.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def log_end(folder: Path) -> str:
    """The last lines that a part's first process wrote."""
    file = folder / "log-0.txt"
    return "\n".join(file.read_text().splitlines()[-15:]) if file.exists() else ""


def _start(order: Order, number: int, seconds: float) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", _CHILD, order.part, "--folder", str(order.folder),
        "--number", str(number), "--seconds", str(seconds), "--options", json.dumps(order.options),
    ]  # fmt: skip
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(_BENCH), str(_KERNELS), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    if order.dry:
        command.append("--dry-run")
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with open(order.folder / f"log-{number}.txt", "ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def _ending(status: int) -> str:
    if status == BROKEN:
        return "ended: its device no longer answered"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _claimed(folder: Path, pid: int) -> set[int]:
    """The items that a process has claimed."""
    claims = [file for file in folder.glob("claim-*") if file.read_text() == str(pid)]
    return {int(file.name.partition("-")[2]) for file in claims}


def _done(folder: Path) -> set[int]:
    """The items that have a row."""
    return {row["index"] for row in _rows(folder)}


def _rows(folder: Path) -> Iterable[Row]:
    for file in folder.glob("rows-*.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a process may die while it writes
                yield json.loads(line)


def _collect(folder: Path, lost: list[Row]) -> list[Row]:
    names = about(folder).get("items", [])
    found = {row["index"]: row for row in [*lost, *_rows(folder)]}
    missed = {"status": MISSED, "seconds": 0.0}
    return [{"item": name, **missed, **found.get(i, {})} for i, name in enumerate(names)]

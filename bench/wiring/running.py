"""A part of this benchmark as a child process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_BENCH = Path(__file__).resolve().parents[1]
_END_S = 10


def environment(threads: int) -> dict[str, str]:
    """Threads of computing, which sleep while they wait: the same for whoever computes."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_BENCH), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


@contextlib.contextmanager
def listening(module: str, *arguments: str, threads: int = 1) -> Iterator[str]:
    """`python -m MODULE` while `with` lasts: where it says it listens."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE, text=True, env=environment(threads),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said.startswith("listening on "):
                raise RuntimeError(f"{module} did not start: {said!r}")
            yield said.removeprefix("listening on ").strip()
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()

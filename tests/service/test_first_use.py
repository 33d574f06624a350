"""A process that serves has loaded everything.

What a library loads at its first use it loads in part when memory or file descriptors are short
just then, and is broken from there on: every further request of that kind would fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = """
import asyncio
import sys

import torch

from flashwire_service.compute import device, worker
from fuzzing.computing import Worker
from fuzzing.examples import examples
from fuzzing.serving import Front

JSON = b'{"q": [[1]], "k": [[1]], "v": [[2]], "dout": [[1]]}'


async def ask(front, worker, schema, body, kind):
    outcome, job = await front.ask(schema, body, [], kind)
    print(schema, outcome, worker.answered(job) if job else "")


async def everything(front, worker):
    for example in bodies:
        if example.schema != "reply":
            await ask(front, worker, example.schema, example.body, "application/msgpack")
    await ask(front, worker, "backward", JSON, "application/json")


front, computing, bodies = Front(), Worker(), examples()
device.prove(torch.device("cpu"))
with asyncio.Runner() as runner:
    runner.run(ask(front, computing, "attention", b"", "application/msgpack"))  # threads, routes
    before = set(sys.modules)
    runner.run(everything(front, computing))
print("loaded", sorted(set(sys.modules) - before))
"""


def test_no_request_loads_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=BENCH, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for route in ("attention accepted", "backward accepted", "check accepted"):
        assert f"{route} computed" in lines
    assert "plan answered " in lines
    assert lines[-1] == "loaded []"

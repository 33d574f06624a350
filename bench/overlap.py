"""Independent calls submitted together, against one after the other.

    python bench/overlap.py [--calls 16] [--concurrency 8] [--rounds 7] [--delay 0 5 20]

Forwards by Client.submit and by Client.attention, through a relay that delivers every piece `delay`
milliseconds late, each way. Medians of interleaved rounds. Concurrency of 1 is `submit` alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from cpu import processor
from flashwire import Client
from load.relay import Relay
from load.service import Service

SHAPES = {"small": (1, 4, 32, 32), "medium": (1, 8, 256, 64)}


def main(chosen: argparse.Namespace) -> None:
    date, cores = datetime.now(UTC).date(), len(os.sched_getaffinity(0))
    print(f"{date}, {processor()}, {cores} cores; {chosen.calls} forwards, float32, ms")
    print(f"| shape | delay each way | one by one | {chosen.concurrency} at once | ratio |")
    print("|---|---:|---:|---:|---:|")
    with Service() as service:
        service.wait_whole()
        for delay in chosen.delay:
            with Relay((service.host, service.port), delay / 1000) as relay:
                url = f"http://127.0.0.1:{relay.port}"
                with Client(url, concurrency=chosen.concurrency) as client:
                    for name, shape in SHAPES.items():
                        apart, beside = compare(client, shape, chosen.calls, chosen.rounds)
                        print(
                            f"| {name} {shape} | {delay:g} | {apart * 1e3:.0f} | "
                            f"{beside * 1e3:.0f} | {apart / beside:.2f} |",
                            flush=True,
                        )


def compare(client: Client, shape: tuple[int, ...], calls: int, rounds: int) -> tuple[float, float]:
    """Seconds for all calls: one after the other, and together."""
    rng = np.random.default_rng(0)
    layers = [[rng.standard_normal(shape, np.float32) for _ in "qkv"] for _ in range(calls)]

    def apart() -> None:
        for qkv in layers:
            client.attention(*qkv, causal=True)

    def beside() -> None:
        futures = [client.submit(client.attention, *qkv, causal=True) for qkv in layers]
        for future in futures:
            future.result()

    beside()  # connections are made
    times = [(_timed(apart), _timed(beside)) for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    return first, second


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delay", type=float, nargs="+", default=[0, 5, 20], help="ms each way")
    main(parser.parse_args())

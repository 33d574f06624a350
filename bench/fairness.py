"""One key that floods, one that asks politely: how long does the polite one wait?

    python bench/fairness.py [--size compute] [--flood 32] [--times 40] [--limit 3]

Both ask the same. Exit status 1 when the 95th percentile of the polite caller's times, while
`--flood` connections of the other key ask without pause, exceeds `--limit` times what it is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from multiprocessing.synchronize import Event

from load.connection import Connection
from load.service import Service
from load.tally import quantile
from load.timing import Others, attention, latencies

# Heads, length, dim of every request: most of its time is computing, or most of it is bytes.
SIZES = {"compute": (1, 2048, 16), "bytes": (8, 512, 64)}
FLOODING, POLITE = "key-that-floods", "key-that-is-polite"
PAUSE_S = 0.02  # of the polite caller, and of the other after a refusal
FILL_S = 3.0  # until the flood is a steady one
ROUNDS = 3


def main(chosen: argparse.Namespace) -> int:
    request = attention(*SIZES[chosen.size], key=POLITE)
    alone: list[float] = []
    beside: list[float] = []
    keys = f"{FLOODING},{POLITE}"
    with Service(FLASHWIRE_API_KEYS=keys) as service:
        service.wait_whole()
        where = service.host, service.port
        latencies(*where, request, 20, PAUSE_S)  # to warm up
        for _ in range(ROUNDS):
            alone += latencies(*where, request, chosen.times, PAUSE_S)
            with Others(flood, *where, chosen.flood, chosen.size):
                beside += latencies(*where, request, chosen.times, PAUSE_S)
    for name, found in (("alone", alone), ("beside the flood", beside)):
        p50, p95 = (1000 * x for x in (statistics.median(found), quantile(found, 0.95)))
        print(f"the polite caller {name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
    ratio = quantile(beside, 0.95) / quantile(alone, 0.95)
    print(f"{ratio:.2f} times its p95 (limit {chosen.limit:g})")
    return int(ratio > chosen.limit)


async def flood(ready: Event, host: str, port: int, count: int, size: str) -> None:
    """Until killed."""
    whole = attention(*SIZES[size], key=FLOODING).whole()
    async with asyncio.TaskGroup() as callers:
        for _ in range(count):
            callers.create_task(_ask(await Connection.open(host, port), whole))
        await asyncio.sleep(FILL_S)
        ready.set()


async def _ask(connection: Connection, whole: bytes) -> None:
    while True:
        await connection.send(whole)
        if (await connection.reply()).status != 200:
            await asyncio.sleep(PAUSE_S)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="compute", help="what a request takes")
    parser.add_argument("--flood", type=int, default=32, help="connections of the other key")
    parser.add_argument("--times", type=int, default=40, help="polite requests in each round")
    parser.add_argument("--limit", type=float, default=3.0, help="on the ratio of p95s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_arguments()))

"""A good request among many connections that only take up room.

    python bench/crowd.py [--slow 100] [--idle 500] [--times 60] [--limit 2] [--patience 60]

Exit status 1 when the median of its time, while `--slow` uploads crawl and `--idle` connections are
open, exceeds `--limit` times that of a server without them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from multiprocessing.synchronize import Event

from load.connection import Connection, Request
from load.service import Service
from load.timing import Others, Round, attention, latencies, quiet_rounds, told

SIZE = ((1, 8, 256, 64),) * 3  # q, k and v of the good request
SLOW_SIZE = ((1, 8, 1024, 64),) * 3  # 6 MiB
PIECE, EVERY_S = 8 * 2**10, 0.25  # twice the rate below which an upload is cut off
PAUSE_S = 0.02
ROUNDS = 3


def main(chosen: argparse.Namespace) -> int:
    request = attention(*SIZE)
    with Service() as service:
        service.wait_whole()
        where = service.host, service.port

        def alone() -> Round:
            return latencies(*where, request, chosen.times, PAUSE_S)

        def crowded() -> Round:
            with Others(crowd, *where, chosen.slow, chosen.idle):
                return latencies(*where, request, chosen.times, PAUSE_S)

        alone()  # to warm up
        found = quiet_rounds((alone, crowded), ROUNDS, chosen.patience)
    print(f"a good request alone {told(found[0])}")
    print(f"among {chosen.slow} slow uploads and {chosen.idle} idle connections {told(found[1])}")
    before, among = (statistics.median(one.whole for one in round_.found) for round_ in found)
    print(f"{among / before:.2f} times its median (limit {chosen.limit:g})")
    return int(among > chosen.limit * before)


def crowd(ready: Event, host: str, port: int, slow: int, idle: int) -> None:
    """Until killed."""
    asyncio.run(_crowd(ready, host, port, slow, idle))


async def _crowd(ready: Event, host: str, port: int, slow: int, idle: int) -> None:
    """Every other idle connection has asked for something before."""
    kept = [await Connection.open(host, port) for _ in range(idle)]
    for connection in kept[::2]:
        await connection.send(Request(method="GET", path="/healthz").whole())
        await connection.reply()
    whole = attention(*SLOW_SIZE).whole()
    async with asyncio.TaskGroup() as uploads:
        for _ in range(slow):
            uploads.create_task(_upload(await Connection.open(host, port), whole))
        await asyncio.sleep(2 * EVERY_S)
        ready.set()


async def _upload(connection: Connection, whole: bytes) -> None:
    for at in range(0, len(whole), PIECE):
        await connection.send(whole[at : at + PIECE])
        await asyncio.sleep(EVERY_S)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", type=int, default=100, help="uploads")
    parser.add_argument("--idle", type=int, default=500, help="connections")
    parser.add_argument("--times", type=int, default=60, help="good requests in each of the rounds")
    parser.add_argument("--limit", type=float, default=2.0, help="on the ratio of medians")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds to wait for rounds in which nothing else uses the machine",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_arguments()))

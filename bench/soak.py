"""Steady mixed traffic on a real service: does it stay as it was?

    python bench/soak.py --seconds 300 [--warm 60] [--users 12] [--tolerance 0.05]

Resident memory is looked at every second, and two medians compared: of a while after the first
`--warm` seconds, and of as long a while at the end. Descriptors and threads are compared when the
traffic pauses, before and after. Exit status 1 when memory has grown by more than the tolerance, a
descriptor or thread has been added, a reply was wrong, or a good request was not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time

from load import processes
from load.history import History
from load.judge import Judge
from load.processes import Use
from load.service import Service
from load.tally import Tally, table
from load.traffic import Target
from load.users import Users

MAX_BODY = 4 * 2**20
RESIDUAL_TTL_S = 30.0
FLAGS = (
    "--max-body-bytes", "4MiB", "--queue-bytes", "256MiB", "--max-materialise-bytes", "256MiB",
    "--residual-ttl-s", str(RESIDUAL_TTL_S),
)  # fmt: skip
DEADLINE_S = 30.0
QUIET_S = 1.0  # without traffic, before a look at what processes hold
NICENESS = 10  # of this load, so that the service comes first
PAUSE_S = 0.05  # of a user between two requests, on average
FAULTS = ("raw", "fault", "job failed", "died", "hung")  # in the log
MOST_COMPARED_S = 60.0
MIB = 2**20
HEAD = ("process", "RSS MiB then", "now", "%", "descriptors then", "now", "threads then", "now")


async def main(chosen: argparse.Namespace) -> int:
    tally = Tally()
    with Service(*FLAGS) as service, Judge() as judge:
        os.nice(NICENESS)
        service.wait_whole()
        target = Target(
            host=service.host, port=service.port, max_body=MAX_BODY, deadline_s=DEADLINE_S,
            residual_ttl_s=RESIDUAL_TTL_S, judge=judge, tally=tally, history=History(),
        )  # fmt: skip
        looks = Looks(service)
        async with Users(target, chosen.users, PAUSE_S) as users, looks:
            await users.cover(1)
            await users.press(chosen.warm)
            before = await _held(service)
            began = looks.look()
            await users.press(max(1, chosen.seconds - chosen.warm))
            ended = looks.look()
            after = await _held(service)
        for event in service.events():
            if event["event"] in FAULTS:
                tally.violation(f"the log has {event}")
        service.terminate()
        if (code := service.wait()) != 0:
            tally.violation(f"the exit status is {code}")
        if left := service.left_behind():
            tally.violation(f"processes outlive the service: {left}")
    share = min(MOST_COMPARED_S, (ended - began) / 3)
    then, now = looks.medians(began, began + share), looks.medians(ended - share, ended)
    rows = []
    for role in before:
        grown = now[role] / then[role] - 1
        if grown > chosen.tolerance:
            tally.violation(f"{role}: resident memory has grown by {100 * grown:.1f} %")
        rows.append(_row(tally, role, then[role], now[role], before[role], after[role]))
    tally.print_outcomes()
    tally.print_latencies()
    print()
    table(HEAD, rows)
    tally.print_violations()
    return bool(tally.violations)


class Looks:
    """`async with` looks at the resident memory of each process, by role, every second."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._found: list[tuple[float, dict[str, Use]]] = []

    async def __aenter__(self) -> Looks:
        self._task = asyncio.create_task(self._go_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _go_on(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(1)

    def look(self) -> float:
        """When it was, in time.monotonic()."""
        now, held = time.monotonic(), processes.most(processes.family(self._service.pid))
        self._found.append((now, held))
        return now

    def medians(self, since: float, until: float) -> dict[str, float]:
        """Bytes by role."""
        looks = [held for at, held in self._found if since <= at <= until]
        return {role: statistics.median(held[role].rss for held in looks) for role in looks[0]}


async def _held(service: Service) -> dict[str, Use]:
    """What each process holds while nothing is in flight."""
    await asyncio.sleep(QUIET_S)
    return processes.most(processes.family(service.pid))


def _row(
    tally: Tally, role: str, then: float, now: float, before: Use, after: Use
) -> tuple[object, ...]:
    """Of the table; and violations, where there is more than there was."""
    tally.violations += processes.added(role, before, after)
    sizes = (f"{then / MIB:.1f}", f"{now / MIB:.1f}", f"{100 * now / then - 100:+.1f}")
    counts = (before.descriptors, after.descriptors, before.threads, after.threads)
    return (role, *sizes, *counts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="in all")
    parser.add_argument("--warm", type=float, default=60.0, help="before the first look")
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--tolerance", type=float, default=0.05, help="of resident memory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_arguments())))

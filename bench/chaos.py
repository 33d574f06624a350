"""A real service under mixed traffic while its processes are killed, stopped and starved.

    python bench/chaos.py --seconds 120 [--users 16] [--every 3] [--seed 0]

Asked are good, bad, slow, abandoned, huge and tiny requests over many connections, and every reply
is checked. Every few seconds a worker or a front end is killed, a worker stopped, or left without
memory or descriptors for a while. At the end the processes hold what they held at the start, and a
SIGTERM under load ends them all. Exit status 1 when anything happened that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections import Counter
from pathlib import Path

from load import processes
from load.disturbances import Disturbances
from load.history import History
from load.judge import Judge
from load.processes import Use
from load.recovery import Probes, replaced_after
from load.service import Service
from load.tally import Tally, table
from load.traffic import Target
from load.users import Users

MAX_BODY = 4 * 2**20
RESIDUAL_TTL_S = 30.0
DEADLINE_S = 8.0
WORKERS = FRONTS = 2
FLAGS = (
    "--threads", "1", "--max-body-bytes", "4MiB", "--queue-bytes", "256MiB",
    "--max-materialise-bytes", "256MiB", "--residual-ttl-s", str(RESIDUAL_TTL_S),
    "--residual-bytes", "64MiB", "--max-timeout-ms", str(round(1000 * DEADLINE_S)),
    "--grace-s", "15",
)  # fmt: skip
QUIET_S = 1.0  # without traffic, before a look at what processes hold
NICENESS = 10  # of this load, so that the service comes first
PAUSE_S = 0.05  # of a user between two requests, on average
PROBED_S = 1.0  # once all are there, to see that there are answers
FAULTS = ("fault", "job failed")  # of the log
RSS_NOISE = 32 * 2**20  # what an allocator may hold more or less
MIB = 2**20


async def main(chosen: argparse.Namespace) -> int:
    tally, history = Tally(), History()
    shm = processes.shared_memory()
    with Service(*FLAGS, workers=WORKERS, fronts=FRONTS) as service, Judge() as judge:
        os.nice(NICENESS)
        service.wait_whole()
        target = Target(
            host=service.host, port=service.port, max_body=MAX_BODY, deadline_s=DEADLINE_S,
            residual_ttl_s=RESIDUAL_TTL_S, judge=judge, tally=tally, history=history,
        )  # fmt: skip
        disturbances = Disturbances(service, history, chosen.every, chosen.seed)
        probes = Probes(service.host, service.port)
        async with Users(target, chosen.users, PAUSE_S) as users:
            before = await _held(service, users, chosen.cover)
            await _press(service, users, disturbances, probes, chosen.seconds)
            after = await _held(service, users, chosen.cover)
            await _drain(service, users, tally, history)
        _check_log(service, tally)
        if chosen.log:
            Path(chosen.log).write_text(service.log())
        for role, held in before.items():
            _compare(tally, role, held, after[role], chosen.tolerance)
        if left := processes.shared_memory() - shm:
            tally.violation(f"named shared memory is left: {left}")
        tally.print_outcomes()
        tally.print_latencies()
        _print_recoveries(service, disturbances, probes)
        _print_held(before, after)
    wrong, hung = tally.of("200 wrong"), tally.of("hung")
    internal = tally.of("500 internal")
    print(f"\n{tally.requests} requests: {wrong} wrong, {hung} hung, {internal} status 500")
    tally.print_violations()
    return bool(tally.violations)


async def _press(
    service: Service, users: Users, disturbances: Disturbances, probes: Probes, seconds: float
) -> None:
    """Disturbed traffic for so long, and until each disturbance has been; then until all processes
    are there again.
    """
    disturbing, probing = (asyncio.create_task(side.run()) for side in (disturbances, probes))
    try:
        users.go()
        await users.watch(seconds)
        while not (disturbances.all_done.is_set() or disturbing.done()):
            await users.watch(0.1)
        disturbing.cancel()
        await users.pause()
        await asyncio.to_thread(service.wait_whole)
        await asyncio.sleep(PROBED_S)
    finally:
        for task in (disturbing, probing):
            task.cancel()
        for ended in await asyncio.gather(disturbing, probing, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended or RuntimeError("a side task has ended")


async def _held(service: Service, users: Users, times: int) -> dict[str, Use]:
    """What each process holds after some traffic, with nothing in flight."""
    await users.cover(times)
    await asyncio.sleep(QUIET_S)
    return processes.most(processes.family(service.pid))


async def _drain(service: Service, users: Users, tally: Tally, history: History) -> None:
    """SIGTERM in the midst of traffic: what is in flight is answered, and nothing stays."""
    users.go()
    await asyncio.sleep(1)
    history.note("end")
    users.stop()
    service.terminate()
    code = await asyncio.to_thread(service.wait)
    await users.pause()
    if code != 0:
        tally.violation(f"the exit status after SIGTERM is {code}")
    if left := service.left_behind():
        tally.violation(f"processes outlive the service: {left}")


def _check_log(service: Service, tally: Tally) -> None:
    for event in service.events():
        if event["event"] in FAULTS:
            tally.violation(f"the log has {event}")


def _compare(tally: Tally, role: str, before: Use, after: Use, tolerance: float) -> None:
    if after.rss > before.rss * (1 + tolerance) + RSS_NOISE:
        tally.violation(f"{role}: {before.rss / MIB:.0f} MiB became {after.rss / MIB:.0f}")
    tally.violations += processes.added(role, before, after)


def _print_recoveries(service: Service, disturbances: Disturbances, probes: Probes) -> None:
    """By kind of disturbance: until there are answers again, and until a successor is ready."""
    events = service.events()
    rows = []
    kinds = sorted({done.what for done in disturbances.done})
    for name, chosen in [*((kind, (kind,)) for kind in kinds), ("in all", kinds)]:
        these = [done for done in disturbances.done if done.what in chosen]
        again = [probes.answering_after(done) for done in these]
        replaced = [replaced_after(done, events) for done in these if done.deadly]
        rows.append((name, len(these), *_told(again), *_told(replaced)))
    print()
    head = ("disturbance", "times", "answers again, median", "worst", "replaced, median", "worst")
    table(head, rows)
    print("in seconds; a child that dies again and again is replaced later each time")
    causes = Counter(e["reason"] for e in events if e["event"] == "died")
    causes.update("hung" for e in events if e["event"] == "hung")
    print("in the supervisor's log:", ", ".join(f"{c}: {n}" for c, n in causes.most_common()))


def _told(seconds: list[float | None]) -> tuple[str, str]:
    known = [s for s in seconds if s is not None]
    return (f"{statistics.median(known):.2f}", f"{max(known):.2f}") if known else ("-", "-")


def _print_held(before: dict[str, Use], after: dict[str, Use]) -> None:
    print()
    head = ("process", "RSS MiB then", "now", "descriptors then", "now", "threads then", "now")
    rows = []
    for role, b in before.items():
        a = after[role]
        sizes = (f"{b.rss / MIB:.1f}", f"{a.rss / MIB:.1f}")
        rows.append((role, *sizes, b.descriptors, a.descriptors, b.threads, a.threads))
    table(head, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="of disturbed traffic, at least"
    )
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between disturbances")
    parser.add_argument(
        "--cover",
        type=int,
        default=3,
        help="times each user asks everything before a look at the processes",
    )
    parser.add_argument("--tolerance", type=float, default=0.1, help="of resident memory")
    parser.add_argument("--log", metavar="FILE", help="where to leave the service's log")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_arguments())))

"""What the wire costs: flashwire beside bare sockets, memcpy, and a plain service.

    python bench/wire.py [--quick] [--only 67 --only memory] [--rounds 15]

One run, one table. In each round every wire carries every case, in an order that turns, so that
whatever else the machine does falls on all of them; ratios are medians over rounds. "moving" is a
request without its computing, as the service reports it. Both services compute with equally many
threads. Ends with the ratios that the project promises; exit status 1 when one is not met (with
--quick, which says only that all of this runs, 0).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from cpu import processor
from load.service import Service
from wiring import computing, memory
from wiring.cases import CASES, DECODE, TINY, Case
from wiring.company import CALLERS, Company
from wiring.report import Found, bars, table
from wiring.running import listening
from wiring.wires import (
    MAKERS,
    MEMCPY,
    PLAIN,
    PLAIN_HTTPX,
    RAW_TCP,
    RAW_UNIX,
    SERVICES,
    SHARED,
    TCP,
    UNIX,
    Wire,
    timed,
)

THREADS = len(os.sched_getaffinity(0))
Addresses = Mapping[str, tuple[int | str, ...]]


def main(chosen: argparse.Namespace) -> int:
    cases = [case for case in CASES if _wanted(case.name, chosen.only)]
    if chosen.quick:
        cases = [case for case in cases if case.up < 2**20]
    found = Found()
    with _everything() as (addresses, service):
        if _wanted("memory", chosen.only) and not chosen.quick:
            found.held = _held(addresses[TCP], service)
        with contextlib.ExitStack() as opened:
            wires = {name: MAKERS[name](*where) for name, where in addresses.items()}
            for wire in wires.values():
                opened.callback(wire.close)
            for case in cases:
                _rounds(found, case, wires, chosen.rounds)
        if _wanted("company", chosen.only):
            _company(found, addresses, 1 if chosen.quick else CALLERS, chosen)
    if not chosen.quick:
        found.alone = computing.alone(cases, THREADS, chosen.rounds)
    _print(found, chosen.rounds)
    return int(not chosen.quick and any(bar.met is False for bar in bars(found)))


@contextlib.contextmanager
def _everything() -> Iterator[tuple[Addresses, Service]]:
    """All that carries, and what each is reached by."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-")))
        tcp = stack.enter_context(listening("wiring.raw"))
        unix = stack.enter_context(listening("wiring.raw", str(directory / "raw")))
        plain = stack.enter_context(listening("wiring.plain", str(THREADS), threads=THREADS))
        uds = directory / "flashwire"
        service = stack.enter_context(Service("--threads", str(THREADS), "--uds", str(uds)))
        service.wait_whole()
        yield (
            {
                MEMCPY: (),
                RAW_TCP: (int(tcp),),
                RAW_UNIX: (unix,),
                PLAIN: (int(plain),),
                PLAIN_HTTPX: (int(plain),),
                TCP: (f"http://{service.host}:{service.port}",),
                UNIX: (f"unix://{uds}",),
                SHARED: (f"unix://{uds}", True),
            },
            service,
        )


def _rounds(found: Found, case: Case, wires: Mapping[str, Wire], rounds: int) -> None:
    tensors = case.tensors()
    names = list(wires)
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times = [timed(wires[name], case, tensors) for _ in range(case.calls)]
            if number >= 0:  # the first is to warm up
                found.rounds.setdefault((case.name, name), []).append(times)


def _company(found: Found, addresses: Addresses, callers: int, chosen: argparse.Namespace) -> None:
    names = [name for name in SERVICES if name in addresses]
    rounds, seconds = (1, 0.2) if chosen.quick else (5, 1.5)
    with Company(callers) as company:
        for _ in range(rounds):
            for name in names:
                rate = company.rate(name, addresses[name], seconds)
                found.company.setdefault(name, []).append(rate)


def _held(address: tuple[int | str, ...], service: Service) -> tuple[int, int]:
    """(idle, at most while the 67 MB request is served) of front end and worker."""
    wire = MAKERS[TCP](*address)
    try:
        tensors, tiny = DECODE.tensors(), TINY.tensors()
        for _ in range(10):
            wire.carry(TINY, tiny)
        time.sleep(1.0)
        pids = [*service.pids("front"), *service.pids("worker")]
        idle = memory.held(pids)
        return idle, memory.peak(pids, lambda: [wire.carry(DECODE, tensors) for _ in range(20)])
    finally:
        wire.close()


def _print(found: Found, rounds: int) -> None:
    day = time.strftime("%Y-%m-%d", time.gmtime())
    print(f"{day}, {processor()}, {THREADS} cores; medians of {rounds} interleaved rounds")
    print("\n".join(table(found)), end="\n\n")
    for bar in bars(found):
        print(bar)


def _wanted(name: str, only: list[str]) -> bool:
    return not only or any(text in name for text in only)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small payloads, few rounds, one caller"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help='cases whose name has it ("67 MB"), "company", "memory"; may be given more than once',
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="default: 15; with --quick 2")
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (2 if chosen.quick else 15)
    return chosen


if __name__ == "__main__":
    sys.exit(main(_arguments()))

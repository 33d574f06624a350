"""A million bodies that nobody would send, through all that reads them.

    python bench/fuzz.py [N] [--from NUMBER]

Every body goes through the wire decoder, whole and in pieces. Every 8th also goes the way from an
HTTP body to the job that a worker would get, with one in JSON beside it, and what is accepted is
computed. A body is made from its number: `1 --from NUMBER` repeats one. Exit status 1 at a fault:
an exception outside the tree, two readings of one message, an answer of "internal", time or memory
that no such body may take. The address space is limited, so that memory taken from a claim would be
a fault, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time
import traceback

from fuzzing.examples import examples
from fuzzing.fuzzer import Fuzzer
from load.processes import address_space

EVERY = 8
WARM = 2000  # bodies, before memory is looked at
ROOM = 256 * 2**20  # of address space beyond what is there then
MOST_GROWN = 48 * 2**20  # of resident memory
MOST_FAULTS = 10
NICENESS = 10
MIB = 2**20


async def main(chosen: argparse.Namespace) -> int:
    fuzzer, faults, began = Fuzzer(examples(), EVERY), 0, time.monotonic()
    own = os.getpid()
    before = 0
    for number in range(chosen.first, chosen.first + chosen.n):
        if number == chosen.first + min(WARM, chosen.n - 1):
            before = _peak()
            room = address_space(own) + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
        try:
            await fuzzer.one(number)
        except Exception:
            faults += 1
            print(f"FAULT body {number}\n{traceback.format_exc()}", flush=True)
            if faults == MOST_FAULTS:
                break
    grown = _peak() - before
    print(f"{chosen.n} bodies in {time.monotonic() - began:.0f} s, {faults} faults")
    for name, counted in fuzzer.outcomes.items():
        print(f"{name:16} {', '.join(f'{code}: {n}' for code, n in counted.most_common())}")
    print(f"the slowest: {fuzzer.slowest[1]}, {1000 * fuzzer.slowest[0]:.0f} ms of CPU")
    print(f"peak resident memory: {_peak() / MIB:.0f} MiB, {grown / MIB:.1f} MiB of it since the")
    print(f"first {WARM} bodies (at most {MOST_GROWN / MIB:.0f})")
    return int(faults > 0 or grown > MOST_GROWN)


def _peak() -> int:
    """The most resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("n", nargs="?", type=int, default=1_000_000, help="bodies")
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first")
    return parser.parse_args()


if __name__ == "__main__":
    os.nice(NICENESS)
    sys.exit(asyncio.run(main(_arguments())))

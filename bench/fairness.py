"""One key that floods, one that asks politely: how long does the polite one wait?

    python bench/fairness.py [--size compute] [--flood 32] [--times 80] [--limit 3]

Both ask the same. Exit status 1 when the 95th percentile of the polite caller's times, while
`--flood` connections of the other key ask without pause, exceeds `--limit` times what it is alone.
"""

from __future__ import annotations

import argparse
import sys

from load.flood import flood
from load.service import Service
from load.tally import quantile
from load.timing import Latency, Others, attention, latencies, told

# Heads, length, dim of every request: most of its time is computing, or most of it is bytes.
SIZES = {"compute": (1, 2048, 16), "bytes": (8, 512, 64)}
FLOODING, POLITE = "key-that-floods", "key-that-is-polite"
PAUSE_S = 0.02  # of the polite caller between two requests
ROUNDS = 3


def main(chosen: argparse.Namespace) -> int:
    request = attention(*SIZES[chosen.size], key=POLITE)
    flooding = attention(*SIZES[chosen.size], key=FLOODING).whole()
    alone: list[Latency] = []
    beside: list[Latency] = []
    keys = f"{FLOODING},{POLITE}"
    with Service(FLASHWIRE_API_KEYS=keys) as service:
        service.wait_whole()
        where = service.host, service.port
        latencies(*where, request, 20, PAUSE_S)  # to warm up
        for _ in range(ROUNDS):
            alone += latencies(*where, request, chosen.times, PAUSE_S)
            with Others(flood, *where, chosen.flood, flooding):
                beside += latencies(*where, request, chosen.times, PAUSE_S)
    print(f"the polite caller alone:            {told(alone)}")
    print(f"the polite caller beside the flood: {told(beside)}")
    before, now = (quantile([one.whole for one in found], 0.95) for found in (alone, beside))
    ratio = now / before
    print(f"{ratio:.2f} times its p95 (limit {chosen.limit:g})")
    return int(ratio > chosen.limit)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="compute", help="what a request takes")
    parser.add_argument("--flood", type=int, default=32, help="connections of the other key")
    parser.add_argument("--times", type=int, default=80, help="polite requests in each round")
    parser.add_argument("--limit", type=float, default=3.0, help="on the ratio of p95s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_arguments()))

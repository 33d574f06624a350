"""One key that floods, one that asks politely: how long does the polite one wait?

    python bench/fairness.py [--size compute] [--flood 32] [--times 40] [--limit 3] [--patience 120]

Both ask the same. Exit status 1 when the 95th percentile of the polite caller's times, while
`--flood` connections of the other key ask without pause, exceeds `--limit` times what it is alone.
Of a request in service at its arrival the polite caller waits for the rest, and for no other one:
so twice is what can be had of one worker, and what is beyond it is overhead.
"""

from __future__ import annotations

import argparse
import sys

from load.flood import flood
from load.service import Service
from load.tally import quantile
from load.timing import Others, Round, attention, latencies, quiet_rounds, told

# q, k and v of every request: most of its time is computing, or bytes both ways, or one way.
SIZES = {
    "compute": ((1, 1, 2048, 16),) * 3,
    "bytes": ((1, 8, 512, 64),) * 3,
    "upload": ((1, 1, 1, 1024), (1, 1, 1024, 1024), (1, 1, 1024, 1024)),
    "reply": ((1, 1, 1024, 1), (1, 1, 1, 1), (1, 1, 1, 1024)),
}
FLOODING, POLITE = "key-that-floods", "key-that-is-polite"
PAUSE_S = 0.02  # of the polite caller between two requests
ROUNDS = 5


def main(chosen: argparse.Namespace) -> int:
    sizes = [chosen.size] if chosen.size else list(SIZES)
    ratios = [measure(size, chosen) for size in sizes]
    return int(max(ratios) > chosen.limit)


def measure(size: str, chosen: argparse.Namespace) -> float:
    """How many times its p95 alone the polite caller's p95 is."""
    request = attention(*SIZES[size], key=POLITE)
    flooding = attention(*SIZES[size], key=FLOODING).whole()
    with Service(FLASHWIRE_API_KEYS=f"{FLOODING},{POLITE}") as service:
        service.wait_whole()
        where = service.host, service.port

        def alone() -> Round:
            return latencies(*where, request, chosen.times, PAUSE_S)

        def beside() -> Round:
            with Others(flood, *where, chosen.flood, flooding):
                return latencies(*where, request, chosen.times, PAUSE_S)

        alone()  # to warm up
        before, now = quiet_rounds((alone, beside), ROUNDS, chosen.patience)
    print(f"{size}: the polite caller alone            {told(before)}")
    print(f"{size}: the polite caller beside the flood {told(now)}")
    p95_before, p95_now = (quantile([one.whole for one in r.found], 0.95) for r in (before, now))
    print(f"{size}: {p95_now / p95_before:.2f} times its p95 (limit {chosen.limit:g})", flush=True)
    return p95_now / p95_before


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, help="what a request takes; all if not given")
    parser.add_argument("--flood", type=int, default=32, help="connections of the other key")
    parser.add_argument("--times", type=int, default=40, help="polite requests in each round")
    parser.add_argument("--limit", type=float, default=3.0, help="on the ratio of p95s")
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        help="seconds to wait for rounds in which nothing else uses the machine",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_arguments()))

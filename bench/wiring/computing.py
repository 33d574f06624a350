"""The same cases computed with no wire at all.

    python -m wiring.computing REPEATS NAME...

prints JSON: by case, the median seconds of flashwire_kernels and of SDPA, in interleaved pairs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from wiring.cases import CASES, Case
from wiring.running import environment


def alone(cases: Sequence[Case], threads: int, repeats: int) -> dict[str, tuple[float, float]]:
    """What a fresh process with so many threads measures."""
    names = [case.name for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "wiring.computing", str(repeats), *names],
        env=environment(threads), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return {name: (mine, sdpa) for name, (mine, sdpa) in json.loads(done.stdout).items()}


def main(repeats: int, names: Sequence[str]) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from flashwire_kernels import api

    found = {}
    for case in (case for case in CASES if case.name in names):
        q, k, v = (torch.from_numpy(x).clone() for x in case.tensors())  # aligned, as in a worker
        runs: tuple[Callable[[], object], ...] = (
            lambda q=q, k=k, v=v: api.forward(q, k, v),
            lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v),
        )
        pairs = [[_seconds(run) for run in runs] for _ in range(repeats + 1)][1:]
        found[case.name] = [statistics.median(times) for times in zip(*pairs, strict=True)]
    print(json.dumps(found))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

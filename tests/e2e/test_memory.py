"""What a worker keeps of the requests it has answered: nothing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from load.processes import use_of

SHAPES, MOST_GROWN = 120, 64 * 2**20


def test_checks_of_many_shapes_in_half_precision(server: Any) -> None:
    """Libraries compile a product for each shape, a megabyte of code, and keep it if allowed to."""
    (worker,) = server.worker_pids()
    rng = np.random.default_rng(3)
    with server.client() as client:

        def check(number: int) -> None:
            q = rng.standard_normal((2 + number, 8)).astype(ml_dtypes.bfloat16)
            k = rng.standard_normal((3 + number, 8)).astype(ml_dtypes.bfloat16)
            assert client.check(q, k, k, dout=q).passed

        for number in range(20):
            check(number)
        before = use_of(worker).rss
        for number in range(20, 20 + SHAPES):
            check(number)
    assert use_of(worker).rss - before < MOST_GROWN

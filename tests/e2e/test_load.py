"""What bench/fairness.py and bench/crowd.py measure with."""

from __future__ import annotations

from typing import Any

from load.flood import flood
from load.timing import Others, Round, attention, latencies, quiet_rounds, told

SHAPE = (1, 2, 64, 8)


def test_a_caller_is_timed_alone_and_beside_a_flood(server: Any) -> None:
    request = attention(SHAPE, SHAPE, SHAPE)
    where = server.host, server.port

    def alone() -> Round:
        return latencies(*where, request, 3, 0.0)

    def beside() -> Round:
        with Others(flood, *where, 4, request.whole()):
            return latencies(*where, request, 3, 0.0)

    for round_ in quiet_rounds((alone, beside), 2, 0.0):
        assert len(round_.found) == 6
        assert all(one.whole > one.queue + one.compute > 0 for one in round_.found)
        assert 0 <= round_.foreign <= 1
        assert "computing" in told(round_)

"""A smoke test of bench/overlap.py and its relay. What it measures is for a quiet hour."""

from __future__ import annotations

from typing import Any

import overlap
from flashwire import Client
from load.relay import Relay


def test_compare(server: Any) -> None:
    with (
        Relay((server.host, server.port), delay=0.02) as relay,
        Client(f"http://127.0.0.1:{relay.port}") as client,
    ):
        apart, beside = overlap.compare(client, (1, 1, 4, 4), calls=3, rounds=1)
    assert apart >= 3 * 2 * 0.02, "each way of each call takes its time"
    assert beside >= 2 * 0.02
    assert relay.up > 3 * 3 * 4 * 4 * 4
    assert relay.down > 3 * 4 * 4 * 4

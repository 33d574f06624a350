"""Callers beside each other: what one keeps on the server never becomes another one's.

S19 of the faults that users of comparable software reported: blocks freed by one request, handed to
another while still in use. Here forwards saved by many at once are what could be mixed up.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal  # np.testing loads in no thread

from flashwire import Client, errors
from load.service import Service

KEYS = ("key-of-a", "key-of-b")
LENGTHS = {"key-of-a": 7, "key-of-b": 12}
VALUES = {"key-of-a": 1.0, "key-of-b": 2.0}
THREADS, ROUNDS = 20, 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with room for a few dozen saved forwards, so that they push each other out."""
    with Service("--residual-bytes", "48KiB", FLASHWIRE_API_KEYS=",".join(KEYS)) as service:
        service.wait_whole()
        yield f"http://{service.host}:{service.port}"
        service.terminate()
        assert service.wait() == 0


def test_s19_what_is_saved_stays_its_owners(url: str) -> None:
    faults: list[str] = []
    seen: Counter[str] = Counter()

    def ask(key: str) -> None:
        try:
            with Client(url, api_key=key, retries=8) as client:
                for _ in range(ROUNDS):
                    seen[save_use_and_release(client, key)] += 1
        except Exception as exc:
            faults.append(f"{key}: {exc!r}")

    threads = [threading.Thread(target=ask, args=(KEYS[n % 2],)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert seen["used"]
    assert seen["used"] + seen["gone"] == THREADS * ROUNDS


def save_use_and_release(client: Client, key: str) -> str:
    """One forward of this owner's, its backward, its end; whether it was still there."""
    length, value = LENGTHS[key], VALUES[key]
    q = np.zeros((1, 1, 1, 4), np.float32)
    k = np.zeros((1, 1, length, 4), np.float32)
    v = np.full((1, 1, length, 32), value, np.float32)
    saved = client.attention(q, k, v, return_lse=True, save_for_backward=True)
    assert (saved.out == value).all()
    assert saved.lse.item() == pytest.approx(math.log(length), abs=1e-6)
    dout = np.full((1, 1, 1, 32), value, np.float32)
    try:
        found = client.backward(saved, dout)
        again = client.backward(saved, dout, release=True)
    except errors.Gone:  # pushed out by others
        return "gone"
    assert_array_equal(again.dv, found.dv)
    assert found.dv.shape == v.shape
    assert_allclose(found.dv, value / length, rtol=1e-6)
    assert not found.dq.any()
    return "used"


def test_s19_several_releases_of_one_residual(url: str) -> None:
    """At once: one frees it, all others find it gone."""
    x = np.ones((2, 4), np.float32)
    with Client(url, api_key=KEYS[0]) as client:
        saved = client.attention(x, x, x, save_for_backward=True)
        statuses: list[int] = []

        def free() -> None:
            headers = {"authorization": f"Bearer {KEYS[0]}"}
            reply = httpx.delete(f"{url}/attention/residual/{saved.residual}", headers=headers)
            statuses.append(reply.status_code)

        threads = [threading.Thread(target=free) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Counter(statuses) == {204: 1, 410: 7}
        with Client(url, api_key=KEYS[1]) as stranger, pytest.raises(errors.NotFound):
            stranger.backward(saved, x)

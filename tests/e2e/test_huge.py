"""Tensors above 4 GiB from end to end: HUGE_TENSORS=1 asks for it, and 32 GB of memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BLOCK, TIMES, DIM = 2**20, 18, 64  # 4.5 GiB of float32, one block of keys again and again
LARGER = ("--max-body-bytes", "10GiB", "--upload-bytes", "10GiB", "--queue-bytes", "10GiB")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("HUGE_TENSORS") != "1", reason="asked for by HUGE_TENSORS=1")
def test_keys_of_more_than_4_gib(
    tmp_path: Path, start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, 1, 1, DIM), np.float32)
    block = rng.standard_normal((BLOCK, DIM), np.float32)
    with (tmp_path / "keys").open("wb") as file:
        for _ in range(TIMES):
            file.write(block.data)
    keys = np.memmap(tmp_path / "keys", np.float32, "r", shape=(1, 1, BLOCK * TIMES, DIM))
    assert keys.nbytes > 2**32
    server = start_server(*LARGER)
    with server.client(timeout=280.0) as client:
        began = time.monotonic()
        result = client.attention(q, keys, keys, return_lse=True)
        seconds = time.monotonic() - began
    scores = block.astype(np.float64) @ q[0, 0, 0].astype(np.float64) / 8
    weights = np.exp(scores - scores.max())
    out = weights @ block.astype(np.float64) / weights.sum()
    lse = scores.max() + np.log(weights.sum() * TIMES)
    np.testing.assert_allclose(result.out[0, 0, 0], out, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.lse[0, 0, 0], lse, rtol=1e-6)
    status = Path(f"/proc/{server.worker_pids()[0]}/status").read_text()
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
    with capsys.disabled():
        compute = result.meta["timings_ms"]["compute"] / 1000
        gib = 2 * keys.nbytes / 2**30
        print(
            f"\n{gib:g} GiB up, attention of one query: {seconds:.1f} s, of which {compute:.1f} s "
            f"copying and computing in the worker, which held up to {peak / 2**30:.2f} GiB"
        )
    server.check_unharmed()

"""`flashwire-serve --uds`: the same service, for callers on the same machine."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwire import AsyncClient, Client, errors


async def test_a_service_on_a_unix_socket(
    tmp_path: Path, start_server: Callable[..., Any], make_certificate: Callable[[str], Any]
) -> None:
    """Beside TLS on TCP; with a key; its file is there as long as the service takes requests."""
    certificate = make_certificate("here")
    path = tmp_path / "socket"
    server = start_server(
        *certificate.flags, "--uds", str(path), ca=certificate.cert, API_KEYS="a-long-key"
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    x = np.random.default_rng(0).standard_normal((4, 8, 128, 64), np.float32)
    with Client(f"unix://{path}", api_key="a-long-key") as client:
        found = client.attention(x, x, x)
    async with AsyncClient(f"unix://{path}", api_key="a-long-key") as client:
        again = await client.attention(x, x, x)
    np.testing.assert_array_equal(found.out, again.out)
    with Client(f"unix://{path}") as client, pytest.raises(errors.Unauthorized):
        client.attention(x, x, x)
    server.check_unharmed()
    assert server.stop() == 0
    assert not path.exists()
    with Client(f"unix://{path}", retries=0) as client, pytest.raises(errors.ConnectionLost):
        client.info()

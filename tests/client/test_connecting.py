"""From a URL to a connection: proxies, unix sockets, event loops other than asyncio's."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
import torch

from flashwire import AsyncClient, Client
from flashwire.transport import Transport
from flashwire.transport.aio import AsyncTransport


def test_a_proxy_of_the_environment(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url)
    server.script = [(200, {}, b"")]
    with Client("http://flashwire.test:81") as client:
        assert client.ready()
    assert server.last.path == "http://flashwire.test:81/readyz"


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY"])
def test_no_proxy_for_this_host(
    server: Any, qkv: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    with Client(server.url, retries=0) as client:
        assert not client.ready()
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    with Client(server.url, retries=0) as client:
        client.attention(*qkv)


@pytest.mark.parametrize("url", ["unix://", "unix://run/socket", "unix:///run/", "unix:/run/x"])
def test_no_path_of_a_socket(url: str) -> None:
    with pytest.raises(ValueError, match="unix:///path"):
        Client(url)


async def test_a_unix_socket_and_a_client_of_ones_own() -> None:
    with httpx.Client() as http, pytest.raises(ValueError, match="http://localhost"):
        Client("unix:///run/flashwire.sock", http=http)
    async with httpx.AsyncClient() as http:
        with pytest.raises(ValueError, match="http://localhost"):
            AsyncClient("unix:///run/flashwire.sock", http=http)
    assert repr(Client("unix:///run/flashwire.sock")) == "Client('unix:///run/flashwire.sock')"


async def test_without_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under trio: httpx's transport, made the same."""
    made: list[dict[str, Any]] = []
    reply = httpx.Response(200)

    class Stock:
        def __init__(self, **options: Any) -> None:
            made.append(options)
            self.closed = False

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return reply

        async def aclose(self) -> None:
            self.closed = True

    monkeypatch.setattr(httpx, "AsyncHTTPTransport", Stock)
    monkeypatch.setattr("flashwire.transport.aio._in_asyncio", lambda: False)
    transport = AsyncTransport(uds="/run/x", trust_env=False)
    for _ in range(2):
        assert await transport.handle_async_request(httpx.Request("GET", "http://a")) is reply
    await transport.aclose()
    (options,) = made
    assert (options["uds"], options["trust_env"]) == ("/run/x", False)


async def test_cookies_are_kept(server: Any) -> None:
    """By one, a balancer knows where the caller's residuals are."""
    answer = (200, {"set-cookie": "place=7; path=/"}, b"")
    server.script = [answer, answer, answer, answer]
    with Client(server.url) as client:
        client.ready()
        assert "cookie" not in server.last.headers
        client.ready()
        assert server.last.headers["cookie"] == "place=7"
    async with AsyncClient(server.url) as client:
        await client.ready()
        assert "cookie" not in server.last.headers
        await client.ready()
        assert server.last.headers["cookie"] == "place=7"


def test_a_client_of_ones_own_over_our_transport(server: Any, qkv: Any) -> None:
    with httpx.Client(transport=Transport(), headers={"x-mine": "1"}) as http:
        client = Client(server.url, http=http)
        assert client.attention(*qkv).out.shape == qkv[0].shape
    assert server.last.headers["x-mine"] == "1"


@pytest.mark.parametrize("home", ["numpy", "torch"])
def test_large_results_are_what_was_received(server: Any, client: Client, home: str) -> None:
    """Views of the reply's bytes: aligned, writable, and nobody else's."""
    x: Any = np.random.default_rng(0).standard_normal((1, 1, 200, 100), np.float32)
    x = torch.from_numpy(x) if home == "torch" else x
    first, second = (client.attention(x, x, x, return_lse=True) for _ in range(2))
    out = np.asarray(first.out)
    assert out.ctypes.data % 64 == 0
    assert out.flags.writeable
    assert out.flags.c_contiguous
    before = second.out[0, 0, 0, 0].item(), first.lse[0, 0, 0].item()
    first.out[:] = 7
    assert before == (second.out[0, 0, 0, 0].item(), first.lse[0, 0, 0].item())
    if home == "numpy":
        assert out.base.nbytes > out.nbytes
        assert first.lse.flags.owndata  # small: it does not keep all of the reply

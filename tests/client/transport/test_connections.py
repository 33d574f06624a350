"""Which connections are used again, waited for, noticed to be gone: by both transports alike."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from flashwire.transport import Content, Transport


def one_at_most(**more: Any) -> httpx.Limits:
    return httpx.Limits(max_connections=1, **more)


def test_an_idle_connection_that_the_server_closed(server: Any, caller: Any) -> None:
    server.script = [server.answering(times=1)]
    caller.send()
    assert server.result() is None  # closed
    assert caller.send().body == b"ok"
    assert server.accepted == 2


def test_closed_as_the_next_request_comes(server: Any, caller: Any) -> None:
    """No transport can tell whether it was read; whoever asked decides whether to ask again."""

    def behave(peer: Any) -> None:
        server.answering(times=1)(peer)
        peer.head()

    server.script = [behave]
    caller.send()
    with pytest.raises(httpx.RemoteProtocolError, match="disconnected"):
        caller.send()
    assert caller.send().body == b"ok"


def test_expiry(server: Any, call: Callable[..., Any]) -> None:
    caller = call(server, limits=httpx.Limits(keepalive_expiry=0.02))
    caller.send()
    time.sleep(0.05)
    caller.send()
    assert server.accepted == 2


def test_none_kept(server: Any, call: Callable[..., Any]) -> None:
    caller = call(server, limits=httpx.Limits(max_keepalive_connections=0))
    caller.send()
    caller.send()
    assert server.accepted == 2


def test_the_caller_wants_no_second(server: Any, caller: Any) -> None:
    for _ in range(2):
        caller.send(headers={"connection": "close"})
    assert server.accepted == 2


def test_waiting_for_a_connection(server: Any, call: Callable[..., Any]) -> None:
    caller = call(server, limits=one_at_most())

    async def work() -> bytes:
        first = await caller.opened()
        with pytest.raises(httpx.PoolTimeout):
            await caller.opened(timeout=httpx.Timeout(5, pool=0.02))
        await caller.finish(first)
        second = await caller.opened()
        await caller.finish(second)
        return b"done"

    assert caller.run(work()) == b"done"


def test_a_reply_that_nobody_reads(server: Any, caller: Any) -> None:
    def behave(peer: Any) -> bool:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        return bool(peer.ended())

    server.script = [behave]

    async def work() -> None:
        await caller.finish(await caller.opened())

    caller.run(work())
    assert server.result(), "the connection is closed"
    assert caller.send().body == b"ok"


def test_another_origin_takes_the_place(
    server: Any, call: Callable[..., Any], make_server: Any
) -> None:
    caller = call(server, limits=one_at_most())
    other = make_server()
    for _ in range(2):
        assert caller.send().body == b"ok"
        assert caller.send(path=f"{other.url}/").body == b"ok"
    assert (server.accepted, other.accepted) == (2, 2)


@pytest.mark.parametrize("kind", ["stock-async", "ours-async"])
@pytest.mark.parametrize("moment", ["head", "body", "sending"])
def test_cancelled(server: Any, call: Callable[..., Any], moment: str) -> None:
    began = threading.Event()

    def behave(peer: Any) -> bool:
        peer.head()
        if moment == "body":
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        began.set()
        if moment == "sending":
            time.sleep(0.1)
            with pytest.raises(EOFError):
                peer._exactly(2**30)
            return True
        return bool(peer.ended())

    server.script = [behave]
    caller = call(server)
    content = {"content": [bytes(2**24)] * 2} if moment == "sending" else {}

    async def work() -> None:
        task = asyncio.ensure_future(caller._send("POST", "/", **content))
        await asyncio.to_thread(began.wait)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    caller.run(work())
    assert server.result(), "the connection is closed"
    assert caller.send().body == b"ok"
    assert server.accepted == 2


@pytest.mark.parametrize("kind", ["ours-sync"])
def test_threads(server: Any, call: Callable[..., Any]) -> None:
    server.script = [server.echoing] * 50
    caller = call(server, limits=httpx.Limits(max_connections=2))
    wrong: list[object] = []

    def use(number: int) -> None:
        for turn in range(20):
            sent = b"%d %d" % (number, turn)
            if caller.send("POST", content=sent).body != sent:
                wrong.append(sent)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert server.accepted <= 2


@pytest.mark.parametrize("kind", ["stock-async", "ours-async"])
def test_tasks(kind: str, server: Any, call: Callable[..., Any]) -> None:
    server.script = [server.echoing] * 50
    caller = call(server, limits=httpx.Limits(max_connections=2))

    async def work() -> list[Any]:
        sent = [b"%d" % n for n in range(40)]
        got = await asyncio.gather(*(caller._send("POST", "/", content=s) for s in sent))
        return [g.body == s for g, s in zip(got, sent, strict=True)]

    assert all(caller.run(work()))
    assert server.accepted <= 2 or kind.startswith("stock")


def test_unix_socket(call: Callable[..., Any], make_server: Any, tmp_path: Path) -> None:
    server = make_server(path=tmp_path / "socket")
    server.script = [server.echoing]
    caller = call(server)
    body = bytes(range(256)) * 2**14
    for _ in range(2):
        assert caller.send("POST", content=[body]).body == body
    assert server.accepted == 1


@pytest.mark.parametrize("kind", ["stock-async", "ours-sync", "ours-async"])  # one leaks a socket
def test_no_unix_socket(call: Callable[..., Any], server: Any, tmp_path: Path) -> None:
    server.uds = str(tmp_path / "none")
    with pytest.raises(httpx.ConnectError):
        call(server).send()


def test_tls(call: Callable[..., Any], make_server: Any, make_certificate: Any) -> None:
    certificate = make_certificate("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    server = make_server(context=context)
    server.script = [server.echoing]
    trusting = call(server, verify=ssl.create_default_context(cafile=certificate.cert))
    body = bytes(range(256)) * 2**15
    content = {"content": Content([memoryview(body)] * 2)}
    for _ in range(2):
        length = {"content-length": str(2 * len(body))}
        assert trusting.send("POST", headers=length, **content).body == 2 * body
    assert server.accepted == 1
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        call(server).send()


def test_no_tls_there(server: Any, call: Callable[..., Any]) -> None:
    server.script = [lambda peer: peer.send(b"HTTP/1.1 400 Bad\r\n\r\n")]
    server.url = server.url.replace("http", "https")
    with pytest.raises(httpx.ConnectError):
        call(server).send()


def test_bytes_behind_a_reply_end_the_connection(server: Any) -> None:
    """Ours alone: they might pass for the next reply."""
    server.script = [server.answering(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\naHTTP/1.1 2")]
    with httpx.Client(transport=Transport(), base_url=server.url) as http:
        assert http.get("/").text == "a"
        assert http.get("/").text == "ok"


def test_a_closed_transport(server: Any) -> None:
    transport = Transport()
    with httpx.Client(transport=transport, base_url=server.url) as http:
        http.get("/")
    with pytest.raises(RuntimeError, match="closed"):
        transport.handle_request(httpx.Request("GET", server.url))

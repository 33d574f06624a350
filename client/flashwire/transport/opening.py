"""Sockets opened under asyncio: the first of a host's addresses that answers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx

from flashwire.transport.connection import tune
from flashwire.transport.pool import Origin

_STAGGER_S = 0.25  # after which the next address is tried, too: RFC 8305
_FULL_S = 0.01  # between tries to connect to a unix socket whose backlog is full


async def opened(origin: Origin, uds: str | None, timeout: float | None) -> socket.socket:
    """A connected socket that does not block. Raises httpx.ConnectError and ConnectTimeout."""
    try:
        async with asyncio.timeout(timeout):
            sock = await (_first(*origin[1:]) if uds is None else _unix(uds))
            tune(sock)
            return sock
    except TimeoutError as exc:
        raise httpx.ConnectTimeout(str(exc)) from exc
    except OSError as exc:
        raise httpx.ConnectError(str(exc)) from exc


async def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                await asyncio.sleep(_FULL_S)
    except BaseException:
        sock.close()
        raise


async def _first(host: str, port: int) -> socket.socket:
    """Connected to the first address that answers; each has a head start before the next."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    running: set[asyncio.Task[socket.socket]] = set()
    failures: list[BaseException] = []
    try:
        while found or running:
            if found:
                family, kind, proto, _, address = found.pop(0)
                running.add(loop.create_task(_connected(family, kind, proto, address)))
            patience = _STAGGER_S if found else None
            done, running = await asyncio.wait(
                running, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if (failure := task.exception()) is None:
                    running |= done - {task}
                    return task.result()
                failures.append(failure)
        raise failures[0]
    finally:
        await _abandon(running)


async def _connected(family: Any, kind: Any, proto: int, address: Any) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _abandon(running: set[asyncio.Task[socket.socket]]) -> None:
    for task in running:
        task.cancel()
    for result in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(result, socket.socket):
            result.close()

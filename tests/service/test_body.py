"""Bodies that come too slowly, and what is left of those that fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from flashwire import wire
from flashwire_service.errors import Refusal
from flashwire_service.front import body
from flashwire_service.front.buffers import Buffers
from flashwire_service.front.uploads import Uploads
from flashwire_service.settings import Settings

# A message whose q has 2**20 elements, up to its payload.
HEAD = b"\x81\xa1q\x83\xa5dtype\xa7float32\xa5shape\x91\xce\x00\x10\x00\x00"
HEAD += b"\xa4data\xc6\x00\x40\x00\x00"


def request_of(receive: Callable[[], Any]) -> Request:
    scope = {"type": "http", "method": "POST", "headers": [(b"transfer-encoding", b"chunked")]}
    return Request(scope, receive)


def piece(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_an_upload_that_stalls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 0.05)
    events = [piece(HEAD), piece(b"\0" * 100)]

    async def receive() -> dict[str, Any]:
        if not events:
            await asyncio.sleep(30)
        return events.pop(0)

    with pytest.raises(Refusal) as caught:
        await body.read(
            request_of(receive),
            Settings(),
            wire.ATTENTION,
            Uploads(2**30),
            Buffers(0),
            wire.Recall(),
        )
    assert caught.value.code == "request_timeout"
    assert f"{len(HEAD) + 100} bytes" in caught.value.detail


async def test_a_steady_upload_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "WINDOW_S", 0.05)
    message = wire.encode({}, {})
    events = [piece(message[:0]), piece(message, more=False)]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.1)
        return events.pop(0)

    settings = Settings(min_upload_rate=0)
    assert (
        await body.read(
            request_of(receive), settings, wire.ATTENTION, Uploads(2**30), Buffers(0), wire.Recall()
        )
    ).size == len(message)


@pytest.mark.parametrize("end", ["disconnect", "bad bytes", "too large"])
async def test_no_memory_is_kept_of_an_upload_that_fails(end: str) -> None:
    events = [piece(HEAD + b"\0" * 60_000)]
    events.append(
        {
            "disconnect": {"type": "http.disconnect"},
            "bad bytes": piece(b"\0", more=False),
            "too large": piece(b"\0" * 100_000),
        }[end]
    )
    events.reverse()

    async def receive() -> dict[str, Any]:
        return events.pop()

    before = len(os.listdir("/proc/self/fd"))
    settings = Settings(max_body_bytes=150_000 if end == "too large" else 2**30)
    with pytest.raises((Refusal, ClientDisconnect)):
        await body.read(
            request_of(receive), settings, wire.ATTENTION, Uploads(2**30), Buffers(0), wire.Recall()
        )
    assert len(os.listdir("/proc/self/fd")) == before

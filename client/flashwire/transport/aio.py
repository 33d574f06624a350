"""AsyncTransport for httpx.AsyncClient under asyncio: the steps of an exchange, awaited.

Under other event loops than asyncio's requests go through httpx's own transport.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx

from flashwire.transport import opening
from flashwire.transport.blocking import LIMITS, REPLY, alpn, release
from flashwire.transport.connection import READ, WRITE, Steps, Wait
from flashwire.transport.exchange import Body, Next, Open, Queue, exchange
from flashwire.transport.pool import Pool

T = TypeVar("T")


class AsyncTransport(httpx.AsyncBaseTransport):
    """What Transport is, awaited. A request that is cancelled has its connection closed."""

    def __init__(
        self,
        *,
        uds: str | None = None,
        limits: httpx.Limits = LIMITS,
        verify: Any = True,
        cert: Any = None,
        trust_env: bool = True,
    ) -> None:
        self._uds = uds
        self._pool = Pool(limits, asyncio.Event)
        self._context = functools.cache(
            lambda: alpn(httpx.create_ssl_context(verify, cert, trust_env))
        )
        self._other: httpx.AsyncHTTPTransport | None = None
        self._make_other = functools.partial(
            httpx.AsyncHTTPTransport,
            uds=uds, limits=limits, verify=verify, cert=cert, trust_env=trust_env,
        )  # fmt: skip

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not _in_asyncio():
            self._other = self._other or self._make_other()
            return await self._other.handle_async_request(request)
        chunks = aiter(request.stream)  # type: ignore[arg-type]
        steps = exchange(self._pool, request, self._context)
        head, body = await _run(steps, lambda step: self._answer(step, chunks))
        reply = AsyncReply(self._pool, body)
        return httpx.Response(
            head.status,
            headers=head.headers,
            stream=reply,
            extensions={
                "http_version": b"HTTP/" + head.version,
                "reason_phrase": head.reason,
                REPLY: reply,
            },
        )

    async def aclose(self) -> None:
        self._pool.close()
        if self._other is not None:
            await self._other.aclose()

    async def _answer(self, step: object, chunks: AsyncIterator[Any]) -> object:
        if isinstance(step, Next):
            return await anext(chunks, None)
        if isinstance(step, Queue):
            return await _set(step.turn.event, step.timeout)
        if isinstance(step, Open):
            return await opening.opened(step.origin, self._uds, step.timeout)
        raise TypeError(f"unknown step: {step!r}")


class AsyncReply(httpx.AsyncByteStream):
    """What Reply is, awaited."""

    def __init__(self, pool: Pool, body: Body) -> None:
        self.length = body.length
        self._pool = pool
        self._body: Body | None = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._body is not None and (piece := await self._run(self._body.piece())):
            yield piece

    async def fill(self, target: memoryview) -> None:
        """Receive the body, none of which has been read, into a buffer of its length."""
        if self._body is not None:
            await self._run(self._body.fill(target))

    async def aclose(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            release(self._pool, body)

    async def _run(self, steps: Steps[T]) -> T:
        try:
            return await _run(steps)
        except BaseException:
            await self.aclose()
            raise


async def _run(steps: Steps[T], answer: Callable[[object], Awaitable[object]] | None = None) -> T:
    """Go through the steps to their result; `answer` has the answers to those that are no Wait."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Wait):
                    answered: object = await _ready(step)
                else:
                    answered = await answer(step)  # type: ignore[misc]
            except BaseException as exc:
                step = steps.throw(exc)
            else:
                step = steps.send(answered)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def _ready(wait: Wait) -> int:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[int] = loop.create_future()

    def tell(events: int) -> None:
        if not ready.done():
            ready.set_result(events)

    descriptor = wait.sock.fileno()
    if wait.events & READ:
        loop.add_reader(descriptor, tell, READ)
    if wait.events & WRITE:
        loop.add_writer(descriptor, tell, WRITE)
    timer = None if wait.timeout is None else loop.call_later(wait.timeout, tell, 0)
    try:
        return await ready
    finally:
        if wait.events & READ:
            loop.remove_reader(descriptor)
        if wait.events & WRITE:
            loop.remove_writer(descriptor)
        if timer is not None:
            timer.cancel()


async def _set(event: Any, timeout: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

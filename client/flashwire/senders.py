"""Who sends a request: a client of httpx, or our own transport without one.

A third of what a tiny request costs its sender would be httpx.Client's, which merges URLs, headers,
authentication, redirects and hooks. None of our requests has any of it to merge. Cookies are kept
as httpx.Client keeps them: a balancer may know by one where a residual lies.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import httpx

from flashwire.transport import Content

_url = functools.lru_cache(maxsize=64)(httpx.URL)


class Wrapped:
    """Over an httpx.Client, or an httpx.AsyncClient; then `send` and `aclose` are awaited."""

    def __init__(self, http: Any) -> None:
        self._http = http

    @property
    def is_closed(self) -> bool:
        return bool(self._http.is_closed)

    def build_request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: Content | None,
        timeout: httpx.Timeout,
    ) -> httpx.Request:
        pieces: Any = None
        if content is not None:
            pieces = aiter(content) if hasattr(self._http, "aclose") else iter(content)
        request: httpx.Request = self._http.build_request(
            method, url, headers=headers, content=pieces, timeout=timeout
        )
        if content is not None:  # what httpx made of it, our transport could not tell from others
            request.stream = content
        return request

    def send(self, request: httpx.Request) -> Any:
        """A reply whose body is still to be read, and which is to be closed."""
        return self._http.send(request, stream=True)

    def close(self) -> None:
        self._http.close()

    async def aclose(self) -> None:
        await self._http.aclose()


class _Unwrapped:
    def __init__(self) -> None:
        self.is_closed = False
        self._cookies = httpx.Cookies()

    def build_request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: Content | None,
        timeout: httpx.Timeout,
    ) -> httpx.Request:
        where = _url(url)
        request = httpx.Request(
            method,
            where,
            headers={"host": where.netloc.decode("ascii"), **headers},
            stream=content or Content(()),
            extensions={"timeout": timeout.as_dict()},
        )
        if self._cookies.jar:
            self._cookies.set_cookie_header(request)
        return request

    def _sent(self, request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        reply.request = request
        if "set-cookie" in reply.headers:
            self._cookies.extract_cookies(reply)
        return reply


class Direct(_Unwrapped):
    """Over a transport of ours."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        super().__init__()
        self._transport = transport

    def send(self, request: httpx.Request) -> httpx.Response:
        """A reply whose body is still to be read, and which is to be closed."""
        return self._sent(request, self._transport.handle_request(request))

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()


class AsyncDirect(_Unwrapped):
    """Over one of ours that is awaited."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        super().__init__()
        self._transport = transport

    async def send(self, request: httpx.Request) -> httpx.Response:
        """A reply whose body is still to be read, and which is to be closed."""
        return self._sent(request, await self._transport.handle_async_request(request))

    async def aclose(self) -> None:
        self.is_closed = True
        await self._transport.aclose()

"""From a URL to who sends: what goes through our own transport, and what through httpx's."""

from __future__ import annotations

import select
import socket
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from flashwire.senders import AsyncDirect, Direct, Wrapped
from flashwire.transport import Transport

_UNIX = "unix://"
# What our transport is made of; Windows lacks both.
_SUPPORTED = hasattr(socket.socket, "sendmsg") and hasattr(select, "poll")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is. `base` is what HTTP is told, `uds` the path of a unix socket, and `shared`
    says whether large bodies go through shared memory, where the server offers it.
    """

    url: str
    base: str
    uds: str | None = None
    shared: bool = False

    @classmethod
    def of(cls, url: str, *, shared_memory: bool = False) -> Endpoint:
        """Raises ValueError."""
        if url.startswith(f"{_UNIX}/") and not url.endswith("/"):
            return cls(url, "http://localhost", url.removeprefix(_UNIX), shared_memory)
        if shared_memory:
            raise ValueError(f"shared_memory needs a url unix:///path, got {url!r}")
        parts = urlsplit(url)
        try:
            port_fits = parts.port != 0
        except ValueError:
            port_fits = False
        if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits:
            raise ValueError(
                f"url must be http://host:port, https://host:port or unix:///path, got {url!r}"
            )
        return cls(url.rstrip("/"), url.rstrip("/"))

    def sender(self) -> Wrapped | Direct:
        """What sends requests to this server."""
        if self._stock:
            stock = httpx.HTTPTransport(uds=self.uds) if self.uds else None
            return Wrapped(httpx.Client(transport=stock))
        if self.shared and self.uds:
            from flashwire.local.transport import SharedTransport  # Linux only

            return Direct(SharedTransport(self.uds, Transport(uds=self.uds)))
        return Direct(Transport(uds=self.uds))

    def async_sender(self) -> Wrapped | AsyncDirect:
        """The same, to be awaited."""
        from flashwire.transport.aio import AsyncTransport  # loads asyncio

        if self._stock:
            stock = httpx.AsyncHTTPTransport(uds=self.uds) if self.uds else None
            return Wrapped(httpx.AsyncClient(transport=stock))
        if self.shared and self.uds:
            from flashwire.local.transport import AsyncSharedTransport  # Linux only

            return AsyncDirect(AsyncSharedTransport(self.uds, AsyncTransport(uds=self.uds)))
        return AsyncDirect(AsyncTransport(uds=self.uds))

    def refuse_other(self, http: httpx.Client | httpx.AsyncClient | None) -> None:
        """A client of the caller's own knows itself where it connects to."""
        if http is not None and self.uds is not None:
            raise ValueError(
                "a unix socket is reached by `http`'s own transport: make that of the socket, "
                "and give http://localhost as url"
            )

    @property
    def _stock(self) -> bool:
        """Whether httpx's transport has to do: for a proxy that the environment names."""
        if not _SUPPORTED:
            return True
        if self.uds is not None:
            return False
        parts, proxies = urlsplit(self.base), urllib.request.getproxies()
        proxied = proxies.get(parts.scheme) or proxies.get("all")
        return bool(proxied) and not urllib.request.proxy_bypass(parts.hostname or "")

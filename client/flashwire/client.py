"""Client and AsyncClient: bytes to a server and back.

What to send, what a reply means and when to try again is in operations.py and core.py, once for
both; their docstrings are those of the methods here. Nothing here knows more than HTTP.
"""

from __future__ import annotations

import inspect
import itertools
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast
from urllib.parse import urlsplit

import httpx
import numpy as np
import numpy.typing as npt

from flashwire import operations, wire
from flashwire._version import __version__
from flashwire.connecting import Endpoint
from flashwire.core import Operation, Policy, Request, Response, converse
from flashwire.errors import (
    ConnectionLost,
    FlashwireError,
    RequestError,
    TransportTimeout,
    UnexpectedReply,
)
from flashwire.senders import AsyncDirect, Direct, Wrapped
from flashwire.transport import Content
from flashwire.transport.blocking import REPLY

P = ParamSpec("P")
T = TypeVar("T")
_CONNECT = 10.0  # seconds
_GRACE = 10.0  # seconds beyond its deadline in which a server may still say that it has passed
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_SILENCE: Mapping[type[httpx.HTTPError], str] = {
    httpx.ConnectTimeout: f"no connection within {_CONNECT:g} s",
    httpx.ReadTimeout: "no answer in time",
    httpx.WriteTimeout: "it took no more bytes in time",
    httpx.PoolTimeout: "no connection became free in time",
}
_NOT_READY = (ConnectionLost, RequestError, UnexpectedReply)


def _document(method: Callable[..., Any], operation: Callable[..., Any]) -> None:
    """Give a method the name, docstring and signature of its operation."""
    signature = inspect.signature(operation)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__name__ = operation.__name__
    method.__qualname__ = operation.__qualname__
    method.__doc__ = operation.__doc__
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )


def _blocking(operation: Callable[P, Operation[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(*args, **kwargs))

    _document(method, operation)
    return method


def _awaited(
    operation: Callable[P, Operation[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(operation(*args, **kwargs))

    _document(method, operation)
    return method


class Client:
    """A flashwire server, blocking. Safe to share between threads. Close it, or use `with`.

    url       "http://host:8000", or "unix:///run/flashwire.sock" for a server on this machine
    api_key   sent as a bearer token
    timeout   seconds the server may take for queue and compute, retries included; None for its own
              limit. Every method takes another for itself
    retries   tries after the first, for lost connections, 429 and 503
    http      an httpx.Client with settings of your own (TLS, proxies); you close it then
    concurrency   calls that `submit` has under way at once, each on a connection of its own
    shared_memory
              whether large tensors are placed in memory that the server maps, and its results are
              used where it wrote them, where the server offers it; "unix://" only

    Methods raise the exceptions of flashwire.errors.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        retries: int = 3,
        http: httpx.Client | None = None,
        concurrency: int = 8,
        shared_memory: bool = False,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._endpoint = Endpoint.of(url, shared_memory=shared_memory)
        self._endpoint.refuse_other(http)
        self._policy = _policy(api_key, timeout, retries)
        self._http = self._endpoint.sender() if http is None else Wrapped(http)
        self._owned = http is None
        self._concurrency = concurrency
        self.name = f"client-{next(_numbers)}"  # in this process, for whom only strings can reach
        _clients[self.name] = self
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()  # of _threads and _closed
        self._before_close: list[Callable[[Client], None]] = []

    attention = _blocking(operations.attention)
    backward = _blocking(operations.backward)
    gradients = _blocking(operations.gradients)
    check = _blocking(operations.check)
    plan = _blocking(operations.plan)
    release = _blocking(operations.release)
    info = _blocking(operations.info)

    def ready(self, *, timeout: float | None = 5.0) -> bool:
        """Whether a worker is ready to compute. False also when no server answers."""
        try:
            self._run(operations.ready(timeout=timeout))
        except _NOT_READY:
            return False
        return True

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start `call(*args, **kwargs)` in a thread of this client: a Future of what it returns.

            futures = [client.submit(client.check, q, k, v) for q, k, v in layers]
            reports = [future.result() for future in futures]

        `concurrency` calls are under way at once, the others wait their turn. result() raises what
        the call raises. cancel() stops a call that waits; one under way goes on to its end. Arrays
        are read when their turn comes: leave them as they are until then.
        """
        with self._lock:
            if self._closed:
                raise FlashwireError("the client is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._concurrency, "flashwire")
            return self._threads.submit(call, *args, **kwargs)

    def close(self) -> None:
        """Cancel what `submit` has not begun, wait for what it has, and close the connections."""
        with self._lock:
            self._closed = True
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for call in self._before_close:
            call(self)
        if self._owned:
            self._http.close()

    def before_close(self, call: Callable[[Client], None]) -> None:
        """Have `call(client)` run by `close`, while there are still connections."""
        self._before_close.append(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._endpoint.url!r})"

    def _run(self, operation: Operation[T]) -> T:
        steps = converse(operation, self._policy)
        reply: Response | ConnectionLost | None = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as done:
                return cast("T", done.value)
            if isinstance(step, Request):
                reply = self._send(step)
            else:
                time.sleep(step)
                reply = None

    def _send(self, request: Request) -> Response | ConnectionLost:
        built = _built(self._http, self._endpoint.base, request)
        try:
            reply = self._http.send(built)
            try:
                body = _Body(reply)
                if body.stream is not None:
                    body.stream.fill(body.rest)
                else:
                    for chunk in reply.iter_bytes():
                        body.add(chunk)
            finally:
                reply.close()
        except httpx.HTTPError as exc:
            return _lost(self._endpoint.url, exc)
        return body.response()


_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def client_of(name: str) -> Client:
    """The client of that name. Raises FlashwireError when nobody holds it any more."""
    client = _clients.get(name)
    if client is None:
        raise FlashwireError(f"there is no {name} any more: keep a client as long as its graphs")
    return client


class AsyncClient:
    """The same for asyncio and trio: every method of Client, awaited."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        retries: int = 3,
        http: httpx.AsyncClient | None = None,
        shared_memory: bool = False,
    ) -> None:
        self._endpoint = Endpoint.of(url, shared_memory=shared_memory)
        self._endpoint.refuse_other(http)
        self._policy = _policy(api_key, timeout, retries)
        self._http = self._endpoint.async_sender() if http is None else Wrapped(http)
        self._owned = http is None

    attention = _awaited(operations.attention)
    backward = _awaited(operations.backward)
    gradients = _awaited(operations.gradients)
    check = _awaited(operations.check)
    plan = _awaited(operations.plan)
    release = _awaited(operations.release)
    info = _awaited(operations.info)

    async def ready(self, *, timeout: float | None = 5.0) -> bool:
        """Whether a worker is ready to compute. False also when no server answers."""
        try:
            await self._run(operations.ready(timeout=timeout))
        except _NOT_READY:
            return False
        return True

    async def aclose(self) -> None:
        """Close the connections."""
        if self._owned:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self._endpoint.url!r})"

    async def _run(self, operation: Operation[T]) -> T:
        import anyio  # comes with httpx, which also imports it late

        steps = converse(operation, self._policy)
        reply: Response | ConnectionLost | None = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as done:
                return cast("T", done.value)
            if isinstance(step, Request):
                reply = await self._send(step)
            else:
                await anyio.sleep(step)
                reply = None

    async def _send(self, request: Request) -> Response | ConnectionLost:
        built = _built(self._http, self._endpoint.base, request)
        try:
            reply = await self._http.send(built)
            try:
                body = _Body(reply)
                if body.stream is not None:
                    await body.stream.fill(body.rest)
                else:
                    async for chunk in reply.aiter_bytes():
                        body.add(chunk)
            finally:
                await reply.aclose()
        except httpx.HTTPError as exc:
            return _lost(self._endpoint.url, exc)
        return body.response()


class _Body:
    """A reply's body as it arrives: into one buffer, when its size is known.

    stream   what can receive it straight into `rest`, which is then all of the buffer; None for a
             transport other than ours
    """

    def __init__(self, reply: httpx.Response) -> None:
        self._reply = reply
        length = reply.headers.get("content-length")
        encoded = "content-encoding" in reply.headers
        self._size = None if length is None or encoded else int(length)
        try:
            self._buffer = _aligned(self._size or 0)
        except (MemoryError, ValueError):
            claim = f"the reply claims {length} bytes, more than there is memory for"
            raise UnexpectedReply(claim, reply.status_code) from None
        self._filled = 0
        self._chunks: list[wire.Buffer] = []
        stream = reply.extensions.get(REPLY)
        whole = stream is not None and stream.length == self._size
        self.stream: Any = stream if whole and self._size is not None else None

    @property
    def rest(self) -> memoryview:
        """All of the buffer, to be filled."""
        self._filled = len(self._buffer)
        return self._buffer.data

    def add(self, chunk: bytes | memoryview) -> None:
        if self._size is None:
            self._chunks.append(chunk)
            return
        end = self._filled + len(chunk)
        if isinstance(chunk, memoryview) and len(chunk) == self._size:  # it is ours, all of it
            self._buffer, self._filled = np.frombuffer(chunk, np.uint8), end
            return
        self._buffer[self._filled : end] = np.frombuffer(chunk, np.uint8)
        self._filled = end

    def response(self) -> Response:
        body = self._buffer[: self._filled]
        if self._size is None:
            body = np.frombuffer(b"".join(self._chunks), np.uint8)
        return Response(self._reply.status_code, self._reply.headers, body)


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """A buffer that begins where payloads, which are aligned in a message, are so in memory."""
    buffer = np.empty(nbytes + wire.ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % wire.ALIGNMENT
    return buffer[start : start + nbytes]


def _policy(api_key: str | None, timeout: float | None, retries: int) -> Policy:
    headers = {
        "accept": f"{wire.MEDIA_TYPE}, application/json;q=0.5",
        "accept-encoding": "identity",  # floats do not compress; unpacking them only costs
        "user-agent": f"flashwire/{__version__}",
    }
    if api_key is not None:
        if not api_key.isascii() or not api_key.isprintable():
            raise ValueError("an API key has printable ASCII characters only")
        headers["authorization"] = f"Bearer {api_key}"
    return Policy(timeout=timeout, retries=retries, headers=headers)


def _built(http: Wrapped | Direct | AsyncDirect, base: str, request: Request) -> httpx.Request:
    if http.is_closed:
        raise FlashwireError("the client is closed")
    headers = dict(request.headers)
    if request.body:
        headers["content-length"] = str(request.size)
    wait = None if request.deadline is None else request.deadline + _GRACE
    content = Content(request.body) if request.body else None
    timeout = httpx.Timeout(wait, connect=_CONNECT)
    return http.build_request(request.method, base + request.path, headers, content, timeout)


def _lost(url: str, exc: httpx.HTTPError) -> ConnectionLost:
    """httpx's exceptions as ours, in the one place that knows both. Theirs would only repeat it."""
    if isinstance(exc, (httpx.LocalProtocolError, httpx.UnsupportedProtocol)):
        raise FlashwireError(f"the request cannot be sent: {exc}") from exc
    if not isinstance(exc, httpx.TransportError):
        raise UnexpectedReply(f"{type(exc).__name__}: {exc}") from exc
    kind = TransportTimeout if isinstance(exc, httpx.TimeoutException) else ConnectionLost
    root = _root(exc)
    hint = ""
    if getattr(root, "reason", None) in _NO_TLS:
        hint = f"Does it speak TLS? If not, its address is http://{urlsplit(url).netloc}"
    elif isinstance(exc, (httpx.ConnectError, httpx.ConnectTimeout)):
        hint = "Is flashwire-serve running there?"
    return kind(f"{url}: {_SILENCE.get(type(exc)) or _words(root)}", hint)


def _root(exc: BaseException) -> BaseException:
    """What happened first; of several addresses of a host, at the first."""
    while cause := exc.__cause__ or exc.__context__:
        exc = cause
    return exc.exceptions[0] if isinstance(exc, BaseExceptionGroup) else exc


def _words(root: BaseException) -> str:
    if isinstance(root, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {root.verify_message}"
    if isinstance(root, ssl.SSLError):
        return f"TLS failed: {(root.reason or str(root)).replace('_', ' ').lower()}"
    if isinstance(root, OSError) and root.errno is not None:
        text = os.strerror(root.errno) if root.errno > 0 else str(root.strerror)
        return text[:1].lower() + text[1:]
    return str(root) or type(root).__name__

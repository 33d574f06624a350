"""A request's body: received within its limits, copied where a worker can read it, and read.

Small bodies stay bytes. Larger ones go chunk by chunk into memory that a worker will share; a
msgpack message is read there while it arrives, so a bad header ends the upload.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Any

import numpy as np
from starlette.requests import Request

from flashwire import wire
from flashwire_service.errors import Refusal
from flashwire_service.front import incoming, json_codec
from flashwire_service.front.buffers import Buffers
from flashwire_service.front.lent import Lent
from flashwire_service.front.message import Message, quoted
from flashwire_service.front.uploads import Upload, Uploads
from flashwire_service.ipc.channel import MAX_INLINE
from flashwire_service.ipc.memory import Memory
from flashwire_service.settings import Settings

JSON = "application/json"
_Piece = bytes | memoryview
WINDOW_S = 10.0  # an upload may be silent, or short of the minimum rate, for so long


async def read(
    request: Request,
    settings: Settings,
    schema: wire.Schema,
    uploads: Uploads,
    buffers: Buffers,
    recall: wire.Recall,
    owner: str = "",
) -> Message:
    """The message in the body of an owner's request. The caller closes it.

    Raises Refusal: unsupported_media_type, too_large, malformed, invalid, request_timeout,
    queue_full when `uploads` have no room for it; and ClientDisconnect.
    """
    with uploads.upload(owner) as upload:
        return await _read(request, settings, schema, upload, buffers, recall)


async def _read(
    request: Request,
    settings: Settings,
    schema: wire.Schema,
    upload: Upload,
    buffers: Buffers,
    recall: wire.Recall,
) -> Message:
    media_type = media_type_of(request)
    limit = settings.max_body_bytes
    if media_type == JSON:
        limit = min(limit, json_codec.MAX_BYTES)
    limits = limits_of(settings, limit)
    total = _content_length(request, limit)
    direct: incoming.Incoming | Lent | None = request.scope.get(incoming.KEY)
    lies = direct.view if isinstance(direct, Lent) else None
    if isinstance(direct, Lent) and lies is not None and schema.payload and media_type != JSON:
        with _refused():
            message = _in_place(direct, lies, schema, limits)
        if message is not None:
            return message
    await upload.begin(total)
    rate = settings.min_upload_rate
    if media_type == JSON:
        async with aclosing(_chunks(request.stream(), limit, rate, upload)) as chunks:
            body = b"".join([chunk async for chunk in chunks])
        message = await asyncio.to_thread(json_codec.decode, body, schema, limits)
        return _in_memory(message)
    store: _Store
    pieces: AsyncGenerator[_Piece, None]
    small = direct is None or direct.length <= MAX_INLINE or not schema.payload
    whole = direct.whole() if direct is not None and small else None
    if small or not isinstance(direct, incoming.Incoming):
        store, pieces = _Store(), request.stream()
    else:
        store = placed = _Placed(buffers, direct.length)
        pieces = direct.stream(placed.target, upload.most)
    with _refused(), closing(store):
        if whole is not None:
            store.add(whole)
            decoded = recall.decode(whole, schema, limits)
        else:
            async with (
                aclosing(pieces),
                aclosing(_chunks(pieces, limit, rate, upload)) as chunks,
            ):
                decoded = await _decode(chunks, store, schema, limits, total)
        if schema.payload:
            _place_offsets(decoded, store)
        return Message(decoded.options, decoded.tensors, *store.take())


def _in_place(
    body: Lent, lies: memoryview, schema: wire.Schema, limits: wire.Limits
) -> Message | None:
    """The message of a body that lies in its caller's memory, and stays there; None for one that
    needs more than the caller has written: there is no place for it but in a copy.
    """
    decoded = wire.decode(lies, schema, limits)
    if any(name in options for _, options in _levels(decoded) for name in wire.OFFSETS):
        return None
    return Message(decoded.options, decoded.tensors, body.take(), body.length)


@contextmanager
def _refused() -> Iterator[None]:
    """What is wrong with a message, as a Refusal."""
    try:
        yield
    except wire.WireError as exc:
        said = str(exc)
        raise Refusal(exc.code, said, field=exc.field, reasons=(said,)) from None


def limits_of(settings: Settings, max_message: int) -> wire.Limits:
    """What a message may have, as the settings say."""
    return wire.Limits(
        max_message=max_message,
        max_header=settings.max_message_header_bytes,
        max_depth=settings.max_nesting,
        max_keys=settings.max_map_keys,
        max_rank=settings.max_rank,
        max_elements=settings.max_elements,
    )


def media_type_of(request: Request) -> str:
    """The media type of the body; absent is msgpack. Raises Refusal for one not spoken."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Refusal(
            "unsupported_media_type", f"content encoding {quoted(encoding)} is not spoken here"
        )
    given = request.headers.get("content-type", wire.MEDIA_TYPE)
    media_type = given.partition(";")[0].strip().lower()
    if media_type not in (wire.MEDIA_TYPE, JSON):
        raise Refusal(
            "unsupported_media_type",
            f"content type {quoted(given)} is not spoken here; {wire.MEDIA_TYPE} and {JSON} are",
        )
    return media_type


def _content_length(request: Request, limit: int) -> int | None:
    """The parser has made sure that it is a number, and alone."""
    given = request.headers.get("content-length")
    if given is None:
        return None
    if int(given) > limit:
        raise _too_large(f"the body has {int(given)} bytes", limit)
    return int(given)


async def _chunks(
    pieces: AsyncIterator[_Piece], limit: int, min_rate: int, upload: Upload
) -> AsyncGenerator[_Piece, None]:
    """The body as it comes, counted.

    Each byte buys its sender time, 1 / min_rate seconds, of which WINDOW_S can be saved up: so
    over any length of time t, at least (t - WINDOW_S) * min_rate bytes come, however fast the
    beginning was. Only time that is spent on waiting for the sender counts.
    """
    clock = asyncio.get_running_loop().time
    received, patience = 0, WINDOW_S
    while True:
        started = clock()
        try:
            async with asyncio.timeout(patience if min_rate else None):
                chunk = await anext(pieces, None)
        except TimeoutError:
            raise Refusal(
                "request_timeout",
                f"{received} bytes came, and of late fewer than {min_rate} a second",
            ) from None
        if chunk is None:
            return
        received += len(chunk)
        if received > limit:
            raise _too_large("the body is larger", limit)
        if min_rate:
            patience = min(WINDOW_S, patience - (clock() - started) + len(chunk) / min_rate)
        await upload.grow(received)
        yield chunk
        await upload.turn(len(chunk))


async def _decode(
    chunks: AsyncIterator[_Piece],
    store: _Store,
    schema: wire.Schema,
    limits: wire.Limits,
    total: int | None,
) -> wire.Message:
    decoder = wire.Decoder(schema, limits, total=total)
    async for chunk in chunks:
        store.add(chunk)
        if store.size >= decoder.need and not decoder.done:
            decoder.advance(store.view, store.size)
        elif decoder.done and chunk:
            raise wire.WireError("bytes follow the end of the message")
    if not decoder.done:
        decoder.advance(store.view, store.size, final=True)
    return decoder.message


class _Store:
    """Bytes that arrive, copied: in this process while few, else into shared memory."""

    def __init__(self) -> None:
        self.size = 0
        self._few = b""
        self._memory: Memory | None = None
        self._buffers: Buffers | None = None

    def add(self, chunk: _Piece) -> None:
        self.size += len(chunk)
        if self._memory is not None:
            self._memory.write([chunk])
        elif self.size <= MAX_INLINE:
            self._few += chunk
        else:
            self._memory = Memory.create()
            self._memory.write([self._few, chunk])

    @property
    def view(self) -> memoryview:
        return memoryview(self._few) if self._memory is None else self._memory.view

    def append(self, raw: bytes) -> None:
        """Bytes that did not arrive."""
        self.add(raw)

    def take(self) -> tuple[bytes | Memory, int, Buffers | None]:
        """What has arrived, which is then the caller's, and where it may go afterwards."""
        memory, self._memory = self._memory, None
        return (self._few if memory is None else memory), self.size, self._buffers

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


class _Placed(_Store):
    """Bytes that arrive where they are to lie, `length` of them."""

    def __init__(self, buffers: Buffers, length: int) -> None:
        super().__init__()
        self._buffers = buffers
        self._memory = buffers.take(length)
        self.target = self._memory.view[:length]

    def add(self, chunk: _Piece) -> None:
        self.size += len(chunk)

    def append(self, raw: bytes) -> None:
        start, self.size = self.size, self.size + len(raw)
        if self._memory is not None:
            self._memory.grow(self.size)
            self._memory.view[start : self.size] = raw

    def close(self) -> None:
        if self._memory is not None and self._buffers is not None:
            self._buffers.give_back(self._memory)


def _levels(message: wire.Message) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where offsets may stand: the message, and the request inside a check."""
    yield "", message.options
    if isinstance(request := message.options.get("request"), dict):
        yield "request.", request


def _place_offsets(message: wire.Message, store: _Store) -> None:
    """Offsets given as plain lists become int64 tensors behind the message."""
    for prefix, options in _levels(message):
        for name in wire.OFFSETS:
            if name not in options:
                continue
            try:
                raw = np.array(options.pop(name), np.int64).astype("<i8").tobytes()
            except OverflowError:
                raise wire.WireError("is beyond int64", prefix + name, "invalid") from None
            store.append(bytes(-store.size % wire.ALIGNMENT))
            segments = ((store.size, len(raw)),) if raw else ()
            ref = wire.TensorRef("int64", (len(raw) // 8,), segments)
            message.tensors[prefix + name] = ref
            store.append(raw)


def _in_memory(message: Message) -> Message:
    """The same message, its body in shared memory when it is too large for a frame."""
    if isinstance(message.body, bytes) and message.size > MAX_INLINE:
        memory = Memory.create()
        memory.write([message.body])
        message.body = memory
    return message


def _too_large(what: str, limit: int) -> Refusal:
    return Refusal("too_large", f"{what}, the limit is {limit} bytes")

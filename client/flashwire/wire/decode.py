"""Messages read where they lie, as their bytes arrive.

Payloads are never touched and nothing is allocated from a claim: a tensor comes out as its header
and the places of its bytes. A message that is not complete costs little to look at again: reading
resumes at the last complete entry, and not before as many bytes have come as the rest must have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flashwire.wire.cursor import BIN, Cursor, Incomplete
from flashwire.wire.schema import (
    ALIGNMENT,
    ITEM_SIZE,
    OFFSETS,
    PIECE,
    VERSION,
    Header,
    Limits,
    Message,
    Schema,
    TensorRef,
    WireError,
    nearest,
)

HeaderHook = Callable[[str, Header], None]
_T_KEYS = ("dtype", "shape", "pad", "data")


def check_version(value: object, field: str = "version") -> None:
    """Refuse a message of another version. Raises WireError (invalid)."""
    if type(value) is not int or value != VERSION:
        raise WireError(f"must be {VERSION}, got {str(value)[:64]}", field, "invalid")


def decode(
    data: bytes | bytearray | memoryview,
    schema: Schema,
    limits: Limits = Limits(),  # noqa: B008  # frozen
) -> Message:
    """A whole message. Raises WireError."""
    view = memoryview(data)
    decoder = Decoder(schema, limits, total=len(view))
    decoder.advance(view, len(view), final=True)
    return decoder.message


@dataclass(slots=True)
class _Frame:
    """A map being read entry by entry: the message, or a group inside it."""

    name: str | None  # None for the message, "request" for a group
    prefix: str  # "" or "request."
    depth: int
    left: int  # entries still to come
    options: dict[str, Any]
    seen: set[str] = field(default_factory=set)


class Decoder:
    """A strict reader of one message that arrives in any pieces.

        decoder = Decoder(wire.ATTENTION, limits, total=content_length)
        while not decoder.advance(view, filled):
            ...                             # receive: nothing happens before decoder.need bytes
        decoder.message                     # options and tensors

    total       size of the message when it is known beforehand (Content-Length)
    on_header   called once for each tensor as soon as its dtype and shape are read: before its
                payload has arrived, when they precede it

    After an exception a decoder is of no further use.
    """

    def __init__(
        self,
        schema: Schema,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        *,
        total: int | None = None,
        on_header: HeaderHook | None = None,
    ) -> None:
        self.need = 1
        self._schema = schema
        self._limits = limits
        self._total = total
        self._on_header = on_header
        self._cursor = Cursor(limits)
        self._message = Message()
        self._frames: list[_Frame] | None = None  # None before the first byte
        self._announced: set[str] = set()

    @property
    def done(self) -> bool:
        return self._frames == []

    @property
    def message(self) -> Message:
        """The whole message, once `advance` has returned True."""
        if not self.done:
            raise ValueError("the message is not complete")
        return self._message

    def advance(self, view: memoryview, filled: int, *, final: bool = False) -> bool:
        """Read on: the first `filled` bytes of `view` have arrived. True once it is complete.

        `view` is of bytes and may be another one on each call, with the same bytes in it.
        `final` says that no more will come. Raises WireError, and whatever `on_header` raises.
        """
        if filled < self.need and not final:
            return False
        cursor = self._cursor
        cursor.view, cursor.filled = view, filled
        saved = cursor.at, cursor.ceiling
        try:
            while not self.done:
                saved = cursor.at, cursor.ceiling
                self._step()
        except Incomplete as incomplete:
            cursor.at, cursor.ceiling = saved
            self._wait_for(incomplete.need, final)
            return False
        finally:
            cursor.view = memoryview(b"")
        if filled > cursor.at or (self._total or 0) > cursor.at:
            raise WireError("bytes follow the end of the message")
        return True

    def _wait_for(self, need: int, final: bool) -> None:
        if final or (self._total is not None and need > self._total):
            end = self._total if not final else self._cursor.filled
            raise WireError(
                f"the message is truncated: it ends after {end} bytes and claims at least {need}"
            )
        most = self._limits.max_message
        if most is not None and need > most:
            raise WireError(
                f"the message claims {need} bytes, the limit is {most}", None, "too_large"
            )
        self.need = need

    def _step(self) -> None:
        """Read the head of the message, or one entry of the map being read."""
        cursor = self._cursor
        cursor.owed = 0
        if self._frames is None:
            length = cursor.map_length(cursor.tag())
            if length is None:
                raise WireError("the message is not a msgpack map")
            self._frames = [self._frame(None, length, self._message.options)]
            return
        frame = self._frames[-1]
        if frame.left == 0:
            self._frames.pop()
            return
        cursor.owed = 2 * sum([f.left for f in self._frames]) - 1
        self._entry(frame, self._frames)

    def _frame(self, name: str | None, length: int, options: dict[str, Any]) -> _Frame:
        if length > self._limits.max_keys:
            raise WireError(f"has {length} keys, the limit is {self._limits.max_keys}", name)
        if name is None:
            return _Frame(None, "", 1, length, options)
        return _Frame(name, f"{name}.", name.count(".") + 2, length, options)

    def _entry(self, frame: _Frame, frames: list[_Frame]) -> None:
        cursor, schema = self._cursor, self._schema
        key = cursor.key(frame.name)
        name = frame.prefix + key
        if key in frame.seen:
            raise WireError("the key is repeated", name)
        cursor.owed -= 1
        nested = None
        if "." in key and schema.options is not None:  # must not pass for a name inside a group
            raise WireError("is not known: a name has no dot", name, "invalid")
        if name in schema.tensors:
            self._tensor(name, key, frame)
        elif name in schema.groups:
            nested = self._group(name, key, frame)
        elif schema.options is None or name in schema.options:
            frame.options[key] = value = cursor.value(name, frame.depth)
            if key == "version":
                check_version(value, name)
        else:
            hint = nearest(key, schema.siblings(frame.prefix))
            raise WireError(f"is not known{hint}", name, "invalid")
        frame.seen.add(key)
        frame.left -= 1
        if nested is not None:
            frames.append(nested)

    def _group(self, name: str, key: str, frame: _Frame) -> _Frame | None:
        """The map of a group, to be read entry by entry; None for null, which is an absent one."""
        tag = self._cursor.tag()
        length = self._cursor.map_length(tag)
        if length is not None:
            options = frame.options[key] = {}
            return self._frame(name, length, options)
        if tag != 0xC0:
            raise WireError("must be a map", name, "invalid")
        return None

    def _tensor(self, name: str, key: str, frame: _Frame) -> None:
        cursor = self._cursor
        start = cursor.at
        tag = cursor.tag()
        length = cursor.map_length(tag)
        if length is not None:
            reader = _TensorReader(name, cursor, self._schema.payload, self._announce)
            self._message.tensors[name] = reader.read(length)
        elif tag != 0xC0:  # null is an absent tensor
            cursor.at = start
            frame.options[key] = self._offsets(name, key, frame.depth)

    def _offsets(self, name: str, key: str, depth: int) -> list[int]:
        """What may stand in a tensor's place: offsets as a plain list."""
        value = self._cursor.value(name, depth)
        if key not in OFFSETS or not isinstance(value, list):
            raise WireError("must be a tensor: {dtype, shape, data}", name, "invalid")
        if not all(type(item) is int for item in value):
            raise WireError("must hold integers only", name, "invalid")
        return value

    def _announce(self, name: str, header: Header) -> None:
        if name not in self._announced:
            self._announced.add(name)
            if self._on_header is not None:
                self._on_header(name, header)


class _TensorReader:
    """One T = {"dtype", "shape", "pad"?, "data"}, its keys in any order."""

    def __init__(self, name: str, cursor: Cursor, payload: bool, announce: HeaderHook) -> None:
        self._name = name
        self._cursor = cursor
        self._payload = payload
        self._announce = announce
        self._dtype: str | None = None
        self._shape: tuple[int, ...] | None = None
        self._header: Header | None = None
        self._segments: list[tuple[int, int]] | None = None

    def read(self, length: int) -> TensorRef:
        """The tensor whose map of `length` entries begins at the cursor."""
        cursor = self._cursor
        owed = cursor.owed
        seen: set[str] = set()
        for left in range(length - 1, -1, -1):
            cursor.owed = owed + 2 * left + 1
            key = cursor.key(self._name)
            if key in seen:
                raise WireError("the key is repeated", f"{self._name}.{key}")
            seen.add(key)
            cursor.owed -= 1
            self._entry(key)
        if self._header is None or (self._payload and self._segments is None):
            needed = ("dtype", "shape", "data") if self._payload else ("dtype", "shape")
            self._invalid(f"lacks {' and '.join(key for key in needed if key not in seen)}")
        if self._segments is not None:
            self._check_size(sum(size for _, size in self._segments))
        return TensorRef(self._header.dtype, self._header.shape, tuple(self._segments or ()))

    def _entry(self, key: str) -> None:
        if key == "data" and self._payload:
            self._segments = self._read_data()
        elif key == "pad" and self._payload:
            self._read_pad()
        elif key == "dtype":
            self._dtype = self._read_dtype()
        elif key == "shape":
            self._shape = self._read_shape()
        else:
            known = _T_KEYS if self._payload else _T_KEYS[:2]
            self._invalid(f"key {key[:64]!r} is not known{nearest(key, known)}")
        if self._header is None and self._dtype is not None and self._shape is not None:
            self._header = Header(self._dtype, self._shape)
            if self._payload:
                self._check_elements()
            self._announce(self._name, self._header)

    def _check_elements(self) -> None:
        elements, most = math.prod(self._shape or ()), self._cursor.limits.max_elements
        if most is not None and elements > most:
            got = elements if elements < 2**64 else "2**64 or more"
            self._malformed(f"has {got} elements, the limit is {most}")

    def _read_dtype(self) -> str:
        dtype = self._cursor.value(self._name, 2)
        if not isinstance(dtype, str):
            self._invalid(f"dtype must be a string, got {type(dtype).__name__}")
        if dtype not in ITEM_SIZE:
            self._invalid(f"dtype {dtype[:64]!r} is not known{nearest(dtype, ITEM_SIZE)}")
        return dtype

    def _read_shape(self) -> tuple[int, ...]:
        cursor = self._cursor
        length = cursor.array_length(cursor.tag())
        if length is None:
            self._malformed("shape must be a list of non-negative integers")
        most = cursor.limits.max_rank
        if length > most:
            self._malformed(f"has {length} dimensions, the limit is {most}")
        owed = cursor.owed
        shape = []
        for left in range(length - 1, -1, -1):
            cursor.owed = owed + left
            size = cursor.value(self._name, 3)
            if type(size) is not int or size < 0:
                got = str(size)[:40]
                self._malformed(f"shape must be a list of non-negative integers, it has {got}")
            shape.append(size)
        return tuple(shape)

    def _read_pad(self) -> None:
        pad = self._cursor.value(self._name, 2)
        if not isinstance(pad, bytes):
            self._invalid(f"pad must be bin, got {type(pad).__name__}")
        if len(pad) >= ALIGNMENT or any(pad):
            self._malformed(f"pad must be at most {ALIGNMENT - 1} zero bytes")

    def _read_data(self) -> list[tuple[int, int]]:
        cursor = self._cursor
        tag = cursor.tag()
        if tag in BIN:
            size = self._bin_size(tag)
            self._check_size(size)
            return [(cursor.skip_payload(size), size)] if size else []
        count = cursor.array_length(tag)
        if count is None:
            self._invalid("data must be bin, or a list of bins")
        return self._read_pieces(count)

    def _read_pieces(self, count: int) -> list[tuple[int, int]]:
        cursor = self._cursor
        owed = cursor.owed
        if self._header is not None and count != -(-self._header.nbytes // PIECE):
            self._malformed(
                f"data comes in {count} pieces of {PIECE} bytes, {_needed(self._header)}"
            )
        segments = []
        for left in range(count - 1, -1, -1):
            cursor.owed = owed + 2 * left
            size = self._bin_size(cursor.tag())
            if not 0 < size <= PIECE or (left and size != PIECE):
                self._malformed(f"data in pieces must be bins of {PIECE} bytes, the last shorter")
            if not left:
                self._check_size((count - 1) * PIECE + size)
            segments.append((cursor.skip_payload(size), size))
        return segments

    def _bin_size(self, tag: int) -> int:
        if tag not in BIN:
            self._invalid("data must be bin, or a list of bins")
        return self._cursor.uint(BIN[tag])

    def _check_size(self, size: int) -> None:
        """Compare the size of the data with the header, when that has been read."""
        if self._header is not None and size != self._header.nbytes:
            self._malformed(f"data has {size} bytes, {_needed(self._header)}")

    def _invalid(self, detail: str) -> NoReturn:
        raise WireError(detail, self._name, "invalid")

    def _malformed(self, detail: str) -> NoReturn:
        raise WireError(detail, self._name)


def _needed(header: Header) -> str:
    return f"{header.dtype} of shape {list(header.shape)} needs {header.nbytes}"

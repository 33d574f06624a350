"""msgpack values from a buffer that is still filling: bounds and limits checked at every byte."""

from __future__ import annotations

import struct
from typing import Any

from flashwire.wire.schema import Limits, WireError

_UINT = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_INT = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_STR = {0xD9: 1, 0xDA: 2, 0xDB: 4}
BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}
_CONSTANT = {0xC0: None, 0xC2: False, 0xC3: True}
_EXT = frozenset((0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8))


class Incomplete(Exception):
    """The bytes end before the value does. `need` is the least a complete message can have."""

    def __init__(self, need: int) -> None:
        self.need = need


class Cursor:
    """Reads msgpack values from a buffer of which the first `filled` bytes have arrived.

    owed      the least number of bytes that enclosing maps and lists still need after this value
    ceiling   the offset at which everything but payloads would exceed its limit
    """

    __slots__ = ("at", "ceiling", "filled", "limits", "owed", "view")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.view = memoryview(b"")
        self.filled = 0
        self.at = 0
        self.owed = 0
        self.ceiling = limits.max_header

    def take(self, count: int) -> int:
        """The offset of the next `count` bytes, which are then behind the cursor."""
        start = self.at
        end = start + count
        if end + self.owed > self.ceiling:
            raise WireError(
                f"everything but the tensors' data exceeds {self.limits.max_header} bytes"
            )
        if end > self.filled:
            raise Incomplete(end + self.owed)
        self.at = end
        return start

    def skip_payload(self, count: int) -> int:
        """Like take, for bytes that do not count towards the limit on headers."""
        start = self.at
        self.at = end = start + count
        self.ceiling += count
        if end > self.filled:
            raise Incomplete(end + self.owed)
        return start

    def tag(self) -> int:
        """The first byte of a value, which tells its type: take(1), without the call."""
        at = self.at
        if at >= self.filled or at + self.owed >= self.ceiling:
            self.take(1)
        self.at = at + 1
        return self.view[at]

    def uint(self, size: int) -> int:
        start = self.take(size)
        return int.from_bytes(self.view[start : self.at], "big")

    def text(self, size: int, where: str | None) -> str:
        start = self.take(size)
        try:  # of a copy: a caller who shares the memory may change it while it is being decoded
            return bytes(self.view[start : self.at]).decode("utf-8")
        except UnicodeDecodeError:
            raise WireError("a string is not valid UTF-8", where) from None

    def map_length(self, tag: int) -> int | None:
        """Entries of a map, or None when the tag is not a map's."""
        if 0x80 <= tag <= 0x8F:
            return tag & 0x0F
        return self.uint(_MAP[tag]) if tag in _MAP else None

    def array_length(self, tag: int) -> int | None:
        """Items of a list, or None when the tag is not a list's."""
        if 0x90 <= tag <= 0x9F:
            return tag & 0x0F
        return self.uint(_ARRAY[tag]) if tag in _ARRAY else None

    def key(self, where: str | None) -> str:
        tag = self.tag()
        if 0xA0 <= tag <= 0xBF:
            return self.text(tag & 0x1F, where)
        if tag in _STR:
            return self.text(self.uint(_STR[tag]), where)
        raise WireError("the keys of a map must be strings", where)

    def value(self, where: str, depth: int) -> Any:
        """Any value but a tensor: option values, which are small."""
        tag = self.tag()
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag in _CONSTANT:
            return _CONSTANT[tag]
        if 0xA0 <= tag <= 0xBF:
            return self.text(tag & 0x1F, where)
        if tag <= 0x9F or tag in _ARRAY or tag in _MAP:
            return self._container(tag, where, depth)
        return self._scalar(tag, where)

    def _scalar(self, tag: int, where: str) -> Any:
        if tag == 0xCB:
            return struct.unpack_from(">d", self.view, self.take(8))[0]
        if tag == 0xCA:
            return struct.unpack_from(">f", self.view, self.take(4))[0]
        if tag in _UINT:
            return self.uint(_UINT[tag])
        if tag in _INT:
            size = _INT[tag]
            start = self.take(size)
            return int.from_bytes(self.view[start : self.at], "big", signed=True)
        if tag in _STR:
            return self.text(self.uint(_STR[tag]), where)
        if tag in BIN:
            size = self.uint(BIN[tag])
            start = self.take(size)
            return bytes(self.view[start : self.at])
        if tag in _EXT:
            raise WireError("extension types have no meaning here", where)
        raise WireError(f"byte 0x{tag:02x} is not msgpack", where)

    def _container(self, tag: int, where: str, depth: int) -> Any:
        if depth >= self.limits.max_depth:
            raise WireError(f"nested deeper than {self.limits.max_depth} levels", where)
        owed = self.owed
        length = self.array_length(tag)
        if length is not None:
            items = []
            for left in range(length - 1, -1, -1):
                self.owed = owed + left
                items.append(self.value(where, depth + 1))
            return items
        length = self.map_length(tag) or 0
        if length > self.limits.max_keys:
            raise WireError(f"has {length} keys, the limit is {self.limits.max_keys}", where)
        entries: dict[str, Any] = {}
        for left in range(length - 1, -1, -1):
            self.owed = owed + 2 * left + 1
            key = self.key(where)
            if key in entries:
                raise WireError("the key is repeated", f"{where}.{key}")
            self.owed -= 1
            entries[key] = self.value(f"{where}.{key}", depth + 1)
        return entries

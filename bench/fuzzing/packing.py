"""msgpack written badly on purpose: repeated keys, wrong lengths, other types, wasteful bytes."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any

import msgpack

_WIDTHS = {1: ">B", 2: ">H", 4: ">I"}
_LARGE = (2**16, 2**31, 2**32 - 1)


@dataclass(slots=True)
class Pairs:
    """A map as a list of its entries, so that keys may repeat and be of any kind."""

    entries: list[tuple[Any, Any]]


def unpack(data: bytes) -> Any:
    """Maps come out as Pairs."""
    return msgpack.unpackb(
        data, object_pairs_hook=lambda pairs: Pairs(list(pairs)), strict_map_key=False
    )


def pack(value: Any, r: random.Random, madness: float) -> bytes:
    """A value as msgpack; each piece of it is written strangely with probability `madness`."""
    parts: list[bytes] = []
    _write(value, r, madness, parts)
    return b"".join(parts)


def _write(value: Any, r: random.Random, madness: float, parts: list[bytes]) -> None:
    mad = r.random() < madness
    if isinstance(value, Pairs):
        parts.append(_head(len(value.entries), 0x80, (0xDE, 0xDF), r, mad))
        for key, item in value.entries:
            _write(key, r, madness, parts)
            _write(item, r, madness, parts)
    elif isinstance(value, list):
        parts.append(_head(len(value), 0x90, (0xDC, 0xDD), r, mad))
        for item in value:
            _write(item, r, madness, parts)
    elif isinstance(value, bytes):
        parts += [_bytes_head(len(value), (0xC4, 0xC5, 0xC6), r, mad), value]
    elif isinstance(value, str) and mad:
        raw = value.encode() if r.random() < 0.7 else r.randbytes(r.randint(0, 9))
        parts += [_bytes_head(len(raw), (0xD9, 0xDA, 0xDB), r, r.random() < 0.3), raw]
    elif isinstance(value, int) and not isinstance(value, bool) and mad:
        parts.append(_integer(value, r))
    elif mad:
        parts.append(r.choice((b"\xc1", b"\xd4\x01a", b"\xc7\x00\x05", b"\xca\x7f\xc0\0\0")))
    else:
        parts.append(msgpack.packb(value))


def _claimed(length: int, r: random.Random, mad: bool) -> int:
    if not mad or r.random() < 0.5:
        return length
    return r.choice((length + 1, max(0, length - 1), r.choice(_LARGE)))


def _head(length: int, fixed: int, wide: tuple[int, int], r: random.Random, mad: bool) -> bytes:
    length = _claimed(length, r, mad)
    if length < 16 and not mad:
        return bytes([fixed | length])
    tag, width = (wide[0], 2) if length < 2**16 and r.random() < 0.5 else (wide[1], 4)
    return bytes([tag]) + struct.pack(_WIDTHS[width], length)


def _bytes_head(length: int, tags: tuple[int, int, int], r: random.Random, mad: bool) -> bytes:
    length = _claimed(length, r, mad)
    fitting = [i for i in range(3) if length < 2 ** (8 << i)]
    chosen = r.choice(fitting) if mad else fitting[0]
    return bytes([tags[chosen]]) + struct.pack(_WIDTHS[1 << chosen], length)


def _integer(value: int, r: random.Random) -> bytes:
    """As wide as can be, or as a float."""
    if r.random() < 0.3:
        return b"\xcb" + struct.pack(">d", float(value))
    if value >= 0:
        return b"\xcf" + struct.pack(">Q", value)
    return b"\xd3" + struct.pack(">q", value)

"""The packets between a caller and a front end of the same machine: an exchange of HTTP, less TCP.

One packet of a SOCK_SEQPACKET connection is a request, and one that comes back is its reply; a
descriptor of memory may ride along. Both sides read them here, and neither trusts the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

VERSION = 1
SUFFIX = ".shm"  # of the socket's path, behind that of HTTP's
MAX_PACKET = 128 * 1024
MAX_INLINE = 32 * 1024  # bytes of a body that travel in the packet
_MAX_SIZE = 2**63 - 1

Headers = tuple[tuple[bytes, bytes], ...]


class FrameError(ValueError):
    """A packet is not what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The body is `body`, else the first `size` bytes of the connection's memory: that of the
    descriptor that rides along, or of the last one that did.
    """

    method: str
    target: bytes  # path and query, as in HTTP
    headers: Headers = ()
    body: bytes = b""
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The body is `body`, else the first `size` bytes of the memory that rides along."""

    status: int
    headers: Headers = ()
    body: bytes = b""
    size: int = 0


def encode(frame: Request | Reply) -> bytes:
    """A frame as one packet. Raises FrameError when it does not fit."""
    values = {name: getattr(frame, name) for name in frame.__slots__}
    packet: bytes = msgpack.packb({"version": VERSION, **values})
    if len(packet) > MAX_PACKET:
        raise FrameError(f"a frame of {len(packet)} bytes, of which {MAX_PACKET} fit a packet")
    return packet


def decode_request(packet: bytes | memoryview) -> Request:
    """Raises FrameError."""
    values = _unpacked(packet, {"method": str, "target": bytes})
    if not values["target"].startswith(b"/") or not values["target"].isascii():
        raise FrameError("target is not a path")
    return Request(**values)


def decode_reply(packet: bytes | memoryview) -> Reply:
    """Raises FrameError."""
    values = _unpacked(packet, {"status": int})
    if not 100 <= values["status"] <= 599:
        raise FrameError("status is not one of HTTP's")
    return Reply(**values)


def _unpacked(packet: bytes | memoryview, own: dict[str, type]) -> dict[str, Any]:
    """The values of a frame, each of its type. Nothing is allocated from a claim: msgpack takes
    lengths beyond the packet's for an error.
    """
    types = {"version": int, **own, "headers": list, "body": bytes, "size": int}
    try:
        values = msgpack.unpackb(packet)
    except (ValueError, msgpack.exceptions.UnpackException) as e:
        raise FrameError("the packet is not msgpack") from e
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise FrameError(f"a frame has the keys {', '.join(types)}")
    for name, kind in types.items():
        if type(values[name]) is not kind:
            raise FrameError(f"{name} is not of type {kind.__name__}")
    if values.pop("version") != VERSION:
        raise FrameError(f"only version {VERSION} is spoken here")
    if not 0 <= values["size"] <= _MAX_SIZE or (values["size"] and values["body"]):
        raise FrameError("size is not the size of a body that lies in memory")
    values["headers"] = tuple(_header(pair) for pair in values["headers"])
    return values


def _header(pair: Any) -> tuple[bytes, bytes]:
    if not isinstance(pair, list) or [type(part) for part in pair] != [bytes, bytes]:
        raise FrameError("headers are pairs of bytes")
    return pair[0].lower(), pair[1]

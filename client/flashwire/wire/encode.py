"""The canonical encoder: where every byte of a message goes, before any payload is at hand.

Equal messages give equal bytes. Payloads are not copied here: `Layout` says where they belong, and
its `buffers` interleaves them with the few bytes in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from flashwire.wire.schema import (
    ALIGNMENT,
    GROUP_ORDER,
    MAX_BIN,
    OPTION_ORDER,
    PIECE,
    TENSOR_ORDER,
    Header,
    TensorRef,
)

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Layout:
    """A message laid out.

    size      of the whole message in bytes
    texts     (offset, bytes) of everything but payloads
    tensors   where each payload goes, by dotted name, in the order of the message
    """

    size: int
    texts: tuple[tuple[int, bytes], ...]
    tensors: dict[str, TensorRef]

    def write(self, target: memoryview) -> None:
        """Write everything but the payloads into a writable view of at least `size` bytes."""
        for offset, text in self.texts:
            target[offset : offset + len(text)] = text

    def buffers(self, payloads: Mapping[str, memoryview]) -> list[Buffer]:
        """The message in order: its own bytes, and views of each tensor's payload (flat bytes)."""
        parts: list[tuple[int, Buffer]] = list(self.texts)
        for name, ref in self.tensors.items():
            done = 0
            for offset, length in ref.segments:
                parts.append((offset, payloads[name][done : done + length]))
                done += length
        return [part for _, part in sorted(parts, key=lambda part: part[0])]


def lay_out(
    options: Mapping[str, Any], tensors: Mapping[str, Header], *, payload: bool = True
) -> Layout:
    """Lay out a message: options first, then tensors, each in the order of the contract.

    A tensor named "request.q" goes into the map "request", with the options under
    `options["request"]`. Option values are those of `canonical`; names that are no option of a
    request (`meta` in a reply) follow the others in the order given. With `payload` False tensors
    are described without data.
    """
    writer = _Writer(payload)
    writer.map("", options, tensors)
    return writer.finish()


def encode(options: Mapping[str, Any], tensors: Mapping[str, tuple[Header, memoryview]]) -> bytes:
    """A whole message as bytes, payloads copied. For small messages."""
    layout = lay_out(options, {name: header for name, (header, _) in tensors.items()})
    return b"".join(layout.buffers({name: data for name, (_, data) in tensors.items()}))


class _Writer:
    def __init__(self, payload: bool) -> None:
        self._payload = payload
        self._at = 0  # where the text being collected begins
        self._text = bytearray()
        self._texts: list[tuple[int, bytes]] = []
        self._tensors: dict[str, TensorRef] = {}

    def finish(self) -> Layout:
        self._flush()
        return Layout(self._at, tuple(self._texts), self._tensors)

    def map(self, prefix: str, options: Mapping[str, Any], tensors: Mapping[str, Header]) -> None:
        """One map: its options, its groups, its tensors. `prefix` is "" or "request."."""
        inside = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
        own = sorted((n for n in inside if "." not in n), key=_tensor_rank)
        groups = sorted({n.partition(".")[0] for n in inside if "." in n}, key=_group_rank)
        plain = sorted((n for n in options if n not in groups), key=_option_rank)
        self._text += _map_head(len(plain) + len(groups) + len(own))
        for name in plain:
            self._text += msgpack.packb(name) + msgpack.packb(options[name])
        for name in groups:
            self._text += msgpack.packb(name)
            self.map(f"{prefix}{name}.", options.get(name, {}), tensors)
        for name in own:
            self._text += msgpack.packb(name)
            self._tensor(prefix + name, tensors[prefix + name])

    def _tensor(self, name: str, header: Header) -> None:
        described = msgpack.packb("dtype") + msgpack.packb(header.dtype)
        described += msgpack.packb("shape") + msgpack.packb(header.shape)
        if not self._payload:
            self._text += _map_head(2) + described
            self._tensors[name] = TensorRef(header.dtype, header.shape)
            return
        pieces = _pieces(header.nbytes)
        head = msgpack.packb("data")
        if header.nbytes > MAX_BIN:
            head += _array_head(len(pieces))
        pad = self._pad(1 + len(described) + len(head) + len(_bin_head(pieces[0])), header.nbytes)
        self._text += _map_head(4 if pad else 3) + described + pad + head
        segments = []
        for size in pieces:
            self._text += _bin_head(size)
            if size:
                segments.append((self._flush(), size))
                self._at += size
        self._tensors[name] = TensorRef(header.dtype, header.shape, tuple(segments))

    def _pad(self, ahead: int, nbytes: int) -> bytes:
        """The entry that aligns a payload `ahead` bytes from here, empty where none is needed."""
        start = self._at + len(self._text) + ahead
        if nbytes == 0 or start % ALIGNMENT == 0:
            return b""
        key = msgpack.packb("pad")
        zeros = -(start + len(key) + len(_bin_head(0))) % ALIGNMENT
        return bytes(key + _bin_head(zeros) + b"\0" * zeros)

    def _flush(self) -> int:
        """Close the text being collected; the offset behind it."""
        if self._text:
            self._texts.append((self._at, bytes(self._text)))
            self._at += len(self._text)
            self._text.clear()
        return self._at


def _pieces(nbytes: int) -> list[int]:
    if nbytes <= MAX_BIN:
        return [nbytes]
    edges = [*range(0, nbytes, PIECE), nbytes]
    return [b - a for a, b in itertools.pairwise(edges)]


def _map_head(length: int) -> bytes:
    return bytes([0x80 | length]) if length < 16 else b"\xde" + length.to_bytes(2, "big")


def _array_head(length: int) -> bytes:
    return bytes([0x90 | length]) if length < 16 else b"\xdd" + length.to_bytes(4, "big")


def _bin_head(size: int) -> bytes:
    if size < 2**8:
        return b"\xc4" + size.to_bytes(1, "big")
    if size < 2**16:
        return b"\xc5" + size.to_bytes(2, "big")
    return b"\xc6" + size.to_bytes(4, "big")


def _ranking(order: tuple[str, ...]) -> Callable[[str], int]:
    """A sort key: names in this order, others behind them as they come."""
    ranks = {name: rank for rank, name in enumerate(order)}
    return lambda name: ranks.get(name, len(ranks))


_option_rank = _ranking(OPTION_ORDER)
_group_rank = _ranking(GROUP_ORDER)
_tensor_rank = _ranking(TENSOR_ORDER)

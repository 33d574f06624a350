"""A result as the final body of the HTTP reply, in msgpack or JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashwire import wire
from flashwire_service.compute.arrays import NAMES, bytes_of
from flashwire_service.ipc.channel import MAX_INLINE
from flashwire_service.ipc.memory import Memory

# Bytes that an element of a float tensor takes as text, about; and once more in the reply.
JSON_BYTES_PER_ELEMENT = 50
_AT_ONCE = 1 << 14  # elements turned into text in one go, during which no other thread runs


@dataclass(frozen=True, slots=True)
class Body:
    """`inline` when small, else in `memory`."""

    size: int
    inline: bytes | None = None
    memory: Memory | None = None


def encode(
    accept: str, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]
) -> Body:
    """A reply of plain values and tensors (None: absent) in the form that the caller accepts."""
    present = {name: t for name, t in tensors.items() if t is not None}
    if accept == "json":
        return _body(_json(values, present))
    headers = {name: wire.Header(NAMES[t.dtype], tuple(t.shape)) for name, t in present.items()}
    layout = wire.lay_out(values, headers)
    return _body(layout.buffers({name: bytes_of(t) for name, t in present.items()}))


def _body(pieces: list[wire.Buffer]) -> Body:
    size = sum(len(piece) for piece in pieces)
    if size <= MAX_INLINE:
        return Body(size, inline=b"".join(pieces))
    memory = Memory.create()
    try:
        memory.write(pieces)
    except BaseException:
        memory.close()
        raise
    return Body(size, memory=memory)


def _json(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[wire.Buffer]:
    """The pieces of a JSON object, tensors first."""
    members: list[Iterable[str]] = [
        itertools.chain([f'"{name}":'], _json_tensor(t)) for name, t in tensors.items()
    ]
    members += [[f'"{name}":', _text(_json_value(v, name))] for name, v in values.items()]
    pieces: list[wire.Buffer] = [b"{"]
    for number, member in enumerate(members):
        pieces += [piece.encode() for piece in ([","] if number else [])]
        pieces += [piece.encode() for piece in member]
    return [*pieces, b"}"]


def _json_tensor(tensor: torch.Tensor) -> Iterator[str]:
    """Nested lists where they would mean the same in a request, else with dtype and shape."""
    host = tensor.detach().cpu()
    data = _nested(host, finite=bool(host.isfinite().all()))
    if tensor.dtype is torch.float32 and tensor.numel():
        yield from data
        return
    head = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
    yield _text(head)[:-1] + ',"data":'
    yield from data
    yield "}"


def _nested(tensor: torch.Tensor, *, finite: bool) -> Iterator[str]:
    """A tensor as nested lists, in texts of a bounded size."""
    if tensor.numel() <= _AT_ONCE:
        values = tensor.tolist()
        yield _text(values if finite else _json_value(values))
        return
    row = tensor[0].numel()
    if row > _AT_ONCE:
        blocks = (_nested(t, finite=finite) for t in tensor)
    else:  # as many rows at once as fit, without the brackets around them
        step = _AT_ONCE // row
        parts = (tensor[start : start + step] for start in range(0, len(tensor), step))
        blocks = ((text[1:-1] for text in _nested(t, finite=finite)) for t in parts)
    yield "["
    for number, block in enumerate(blocks):
        if number:
            yield ","
        yield from block
    yield "]"


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _json_value(value: Any, name: str = "") -> Any:
    """Non-finite numbers as strings; a seed as one too: it may be beyond 2**53."""
    if isinstance(value, Mapping):
        return {key: _json_value(item, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value) if name == "seed" else value

"""A result as the final body of the HTTP reply, in msgpack or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashwire import wire
from flashwire_service.compute.arrays import NAMES, bytes_of
from flashwire_service.ipc.channel import MAX_INLINE
from flashwire_service.ipc.memory import Memory

# What one element costs while it is a Python float in a list and then text.
JSON_BYTES_PER_ELEMENT = 64


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
        return _body([_json(values, present)])
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


def _json(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bytes:
    document = {name: _json_tensor(t) for name, t in tensors.items()}
    document |= {name: _json_value(value, name) for name, value in values.items()}
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def _json_tensor(tensor: torch.Tensor) -> Any:
    """Nested lists where they would mean the same in a request, else with dtype and shape."""
    data = tensor.detach().cpu().tolist()
    if not bool(tensor.isfinite().all()):
        data = _json_value(data)
    if tensor.dtype is torch.float32 and tensor.numel():
        return data
    return {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data": data}


def _json_value(value: Any, name: str = "") -> Any:
    """Non-finite numbers as strings; a seed as one too: it may be beyond 2**53."""
    if isinstance(value, Mapping):
        return {key: _json_value(item, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value) if name == "seed" else value

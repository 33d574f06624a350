"""Tensors in the bytes of a request, and the bytes of a tensor. Little-endian, C order."""

from __future__ import annotations

import math

import torch

from flashwire_service.ipc.frames import TensorSlot

DTYPES = {
    "bool": torch.bool,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_at(body: memoryview | bytearray, slot: TensorSlot) -> torch.Tensor:
    """The tensor of a slot. It shares the writable `body`, whose memory lives as long as it does,
    unless its data lie in pieces or out of line with its items: then it is a copy.

    Integers are copied, too: they say where others lie. They are checked once, and what was checked
    must be what is used, though a caller may write to memory that it shares at any time.
    """
    dtype = DTYPES[slot.dtype]
    if math.prod(slot.shape) == 0:
        return torch.empty(slot.shape, dtype=dtype)
    if dtype is torch.bool:  # any byte but 0 is true; torch would take bytes as they are
        return _elements(body, slot, torch.uint8).ne(0).view(slot.shape)
    if not dtype.is_floating_point:
        return _elements(body, slot, dtype).clone().view(slot.shape)
    return _elements(body, slot, dtype).view(slot.shape)


def _elements(body: memoryview | bytearray, slot: TensorSlot, dtype: torch.dtype) -> torch.Tensor:
    offset, length = slot.segments[0]
    if len(slot.segments) == 1 and offset % dtype.itemsize == 0:
        return torch.frombuffer(body, dtype=dtype, count=length // dtype.itemsize, offset=offset)
    pieces = [
        torch.frombuffer(body, dtype=torch.uint8, count=length, offset=offset)
        for offset, length in slot.segments
        if length
    ]
    joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
    return joined.view(dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as bytes in C order; no copy when that is how they lie on the host."""
    host = tensor.detach().cpu().contiguous()
    # A single element counts as contiguous whatever its stride, but view(uint8) wants stride 1.
    flat = host.as_strided((host.numel(),), (1,))
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view

"""Arrays as the wire carries them: NumPy and torch to (header, bytes), and back.

Whatever the strides, byte order or device, logical values travel in C order, little-endian; nothing
is copied that already lies so. Neither torch nor ml_dtypes is imported here before it is needed: a
torch tensor can only be given by a caller who has imported torch.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwire.errors import FlashwireError, Invalid
from flashwire.wire import ALIGNMENT, ITEM_SIZE, OFFSETS, Header, TensorRef, nearest

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any  # np.ndarray or torch.Tensor
Home: TypeAlias = "torch.device | None"  # where results go: a torch device, None for NumPy
_ALIASES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_CODES = {
    "bool": "?", "float16": "f2", "float32": "f4", "float64": "f8", "int32": "i4", "int64": "i8",
}  # fmt: skip
_SMALL = 64 * 1024  # bytes
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Payload:
    """A tensor ready for the wire: flat little-endian bytes in C order."""

    header: Header
    data: memoryview


def home_of(like: Array) -> Home:
    """Where results go when the caller gave `like`: its torch device, or None for NumPy."""
    return like.device if _is_torch(like) else None


def dtype_name(dtype: object) -> str:
    """The wire's name of a floating dtype: "bfloat16" for "bf16", torch.bfloat16 or ml_dtypes'.

    Raises Invalid for anything else.
    """
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if isinstance(dtype, type):
        name = dtype.__name__  # np.float32, ml_dtypes.bfloat16
    name = _ALIASES.get(name, name)
    if name not in _FLOATS:
        hint = nearest(name, (*_FLOATS, *_ALIASES))
        raise Invalid(f"dtype {name!r} is not known{hint}", field="dtype")
    return name


def pack(name: str, value: Array, dtype: str | None = None) -> Payload:
    """An array for the wire, its values rounded to `dtype` (nearest, ties to even) when given.

    Zero-copy for C-contiguous little-endian host memory. cu_seqlens may be a list of integers.
    Raises Invalid naming the argument for what is no array, or of a dtype that does not travel.
    """
    if _is_torch(value):
        return _pack_torch(name, value, dtype)
    if name in OFFSETS and isinstance(value, (list, tuple)):
        value = _offsets(name, value)
    if not isinstance(value, (np.ndarray, np.generic)) or isinstance(value, np.ma.MaskedArray):
        given = type(value).__name__
        raise Invalid(f"must be a NumPy array or a torch tensor, got {given}", field=name)
    given = _name_of(value.dtype)
    _check_dtype(name, given, dtype)
    array = np.asarray(value)
    if dtype is not None and dtype != given:
        wide = _round_to_odd(array) if (given, dtype) == ("float64", "bfloat16") else array
        with np.errstate(over="ignore"):  # beyond the largest is infinite, as rounding has it
            array = wide.astype(numpy_dtype(dtype))
    array = np.asarray(array, dtype=numpy_dtype(dtype or given), order="C")
    return Payload(Header(dtype or given, array.shape), array.reshape(-1).view(np.uint8).data)


def unpack(ref: TensorRef, body: npt.NDArray[np.uint8], home: Home) -> Array:
    """A tensor of a message as an array that is writable and nobody else's.

    A large one is the very bytes of the body, if these can be written and lie aligned; a small one
    is copied, so that whoever keeps it does not keep the body with it.
    """
    flat = _in_place(ref, body)
    if home is None:
        if flat is not None:
            return flat.view(numpy_dtype(ref.dtype)).reshape(ref.shape)
        array = np.empty(ref.shape, numpy_dtype(ref.dtype))
        _fill(array.reshape(-1).view(np.uint8), ref, body)
        return array
    torch = sys.modules["torch"]
    kind = getattr(torch, ref.dtype)
    if flat is not None:
        return torch.from_numpy(flat).view(kind).reshape(ref.shape).to(home)
    tensor = torch.empty(ref.shape, dtype=kind)
    if ref.segments:
        _fill(tensor.reshape(-1).view(torch.uint8).numpy(), ref, body)
    return tensor.to(home)


def _in_place(ref: TensorRef, body: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | None:
    """A tensor's bytes where they lie in the body, if they can be an array there."""
    if ref.nbytes < _SMALL or len(ref.segments) != 1 or not body.flags.writeable:
        return None
    offset, length = ref.segments[0]
    flat = body[offset : offset + length]
    return None if flat.ctypes.data % ALIGNMENT else flat


@functools.lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str:
    """dtype.name, which NumPy composes anew each time."""
    return dtype.name


@functools.lru_cache(maxsize=64)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name of the wire; bfloat16 is that of ml_dtypes, imported for it."""
    if name != "bfloat16":
        return np.dtype(f"<{_CODES[name]}")
    try:
        import ml_dtypes
    except ImportError:
        raise FlashwireError(
            "bfloat16 in NumPy needs the package ml_dtypes: pip install 'flashwire[bf16]'"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _is_torch(value: object) -> bool:
    """Whether a value is a torch tensor. Loads nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _fill(flat: npt.NDArray[np.uint8], ref: TensorRef, body: npt.NDArray[np.uint8]) -> None:
    done = 0
    for offset, length in ref.segments:
        flat[done : done + length] = body[offset : offset + length]
        done += length


def _pack_torch(name: str, tensor: torch.Tensor, dtype: str | None) -> Payload:
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise Invalid("must be a dense tensor with values", field=name)
    given = str(tensor.dtype).removeprefix("torch.")
    _check_dtype(name, given, dtype)
    host = tensor.detach().resolve_neg()
    if dtype is not None and dtype != given:
        if (given, dtype) == ("float64", "bfloat16"):
            host = torch.from_numpy(_round_to_odd(host.cpu().numpy()))
        host = host.to(getattr(torch, dtype))
    host = host.cpu().contiguous()
    # A single element counts as contiguous whatever its stride, but view(uint8) wants stride 1.
    flat = host.as_strided((host.numel(),), (1,)).view(torch.uint8)
    return Payload(Header(dtype or given, tuple(host.shape)), flat.numpy().data)


def _check_dtype(name: str, given: str, wanted: str | None) -> None:
    if given not in ITEM_SIZE:
        known = ", ".join(ITEM_SIZE)
        raise Invalid(f"dtype {given} does not travel; known: {known}", field=name)
    if wanted is not None and given not in _FLOATS:
        raise Invalid(f"is {given}, which is not rounded to {wanted}", field=name)


def _offsets(name: str, value: list[int] | tuple[int, ...]) -> npt.NDArray[np.int64]:
    if not all(isinstance(item, (int, np.integer)) and item is not True for item in value):
        raise Invalid("must hold integers only", field=name)
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise Invalid("an offset does not fit in 64 bits", field=name) from None


def _round_to_odd(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """float64 as float32, inexact values to the neighbour with an odd last bit.

    Rounding that to bfloat16 is then the same as rounding once: no new ties have come about
    (Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    with np.errstate(over="ignore"):
        single = wide.astype(np.float32)
    back = single.astype(np.float64)
    inexact = (back != wide) & ~np.isnan(wide)
    bits = single.view(np.uint32) - (inexact & (np.abs(back) > np.abs(wide)))
    odd: npt.NDArray[np.float32] = (bits | inexact).astype(np.uint32).view(np.float32)
    return odd

"""A JSON request as a message: options, tensor headers and the bytes of the tensors.

A tensor is nested lists (all booleans: bool; offsets: int64; else float32), or
{"dtype", "shape"?, "data": nested lists}. Non-finite values are the strings "NaN", "Infinity" and
"-Infinity". Replies in JSON are written by the worker.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashwire import wire
from flashwire_kernels.types import FLOAT_DTYPES, ITEM_SIZE, OFFSET_DTYPES
from flashwire_service.errors import Refusal
from flashwire_service.front.message import Message, quoted, type_name

MAX_BYTES = 2**20
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# An unfinished string runs to the end, and nothing is tried twice: each byte is looked at once.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def decode(body: bytes, schema: wire.Schema, limits: wire.Limits) -> Message:
    """The message in a JSON body of a route. Its size has been checked.

    Raises Refusal: malformed (400) for what is no JSON or contradicts itself, invalid (422) for
    values of a wrong type or beyond their dtype.
    """
    values = parse(body, limits)
    options: dict[str, Any] = {}
    tensors: dict[str, wire.TensorRef] = {}
    data = bytearray()

    def place(name: str, value: object) -> None:
        if not schema.payload:
            tensors[name] = _described(name, value)
            _check_rank(name, tensors[name].shape, limits)
            return
        dtype, shape, raw = _tensor(name, value)
        _check_rank(name, shape, limits)
        data.extend(bytes(-len(data) % wire.ALIGNMENT))
        tensors[name] = wire.TensorRef(dtype, shape, ((len(data), len(raw)),) if raw else ())
        data.extend(raw)

    _split(values, "", schema, options, place)
    return Message(options, tensors, bytes(data), len(data))


def parse(body: bytes, limits: wire.Limits) -> dict[str, Any]:
    """A JSON object, strictly: no repeated key, no NaN literal, no number beyond float64.

    Lists nest as deeply as anywhere, and once more for each dimension of a tensor.
    """
    deepest = limits.max_depth + limits.max_rank
    if _nesting(body) > deepest:
        raise Refusal("malformed", f"JSON nested more than {deepest} deep")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return _object(pairs, limits.max_keys)

    try:
        values = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=_refuse_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as exc:
        where = f" at character {exc.pos}" if isinstance(exc, json.JSONDecodeError) else ""
        what = exc.msg if isinstance(exc, json.JSONDecodeError) else type(exc).__name__
        raise Refusal("malformed", f"the body is not JSON: {what}{where}") from None
    if not isinstance(values, dict):
        raise Refusal("malformed", f"the body must be an object, got {type_name(values)}")
    return values


def _nesting(body: bytes) -> int:
    """The depth of brackets outside strings, counted before a parser recurses."""
    text = np.frombuffer(_STRING.sub(b"", body), np.uint8)
    opened = (text == ord("[")) | (text == ord("{"))
    closed = (text == ord("]")) | (text == ord("}"))
    depth = np.cumsum(opened.astype(np.int32) - closed)
    return int(depth.max(initial=0))


def _object(pairs: list[tuple[str, Any]], most: int) -> dict[str, Any]:
    if len(pairs) > most:
        raise Refusal("malformed", f"an object has {len(pairs)} keys, the limit is {most}")
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Refusal("malformed", f"key {quoted(key)} is repeated", field=key)
            seen.add(key)
    return values


def _refuse_constant(literal: str) -> NoReturn:
    raise Refusal("malformed", f'{literal} is no JSON; write the string "{literal}" in a tensor')


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Refusal("malformed", f"a number beyond float64: {quoted(text)}")
    return value


def _int(text: str) -> int:
    if len(text) > 300:
        _float(text)
    return int(text)


def _split(
    values: dict[str, Any],
    prefix: str,
    schema: wire.Schema,
    options: dict[str, Any],
    place: Callable[[str, object], None],
) -> None:
    """Tensors go to `place`, everything else to `options`."""
    for key, value in values.items():
        name = prefix + key
        if "." in key:  # no name of ours, and must not pass for a nested one
            options[key] = value
        elif name in schema.tensors and not (isinstance(value, list) and not schema.payload):
            if value is not None:
                place(name, value)
        elif name in schema.groups and isinstance(value, dict):
            options[key] = {}
            _split(value, name + ".", schema, options[key], place)
        else:
            options[key] = value


def _described(name: str, value: object) -> wire.TensorRef:
    """A tensor without its data: {"dtype", "shape"}."""
    members = _members(name, value, ("dtype", "shape"), ())
    return wire.TensorRef(_dtype(name, members["dtype"]), _shape(name, members["shape"]))


def _tensor(name: str, value: object) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype, shape, little-endian bytes in C order) of a tensor in one of its JSON forms."""
    if isinstance(value, list):
        shape, flat = _flatten(name, value)
        if not flat:
            raise _invalid(name, 'is empty: write {"dtype", "shape", "data"}, shape included')
        dtype = _guess_dtype(name, flat)
        return dtype, shape, _encode(name, dtype, flat)
    members = _members(name, value, ("dtype", "data"), ("shape",))
    dtype = _dtype(name, members["dtype"])
    shape, flat = _flatten(name, members["data"])
    if members.get("shape") is not None:
        shape = _agreed(name, _shape(name, members["shape"]), shape, not flat)
    elif not flat:
        raise _invalid(name, "has no elements: its shape must be given")
    return dtype, shape, _encode(name, dtype, flat)


def _members(
    name: str, value: object, needed: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(name, f"must be nested lists or an object, got {type_name(value)}")
    if missing := [key for key in needed if key not in value]:
        raise _invalid(name, f"lacks {' and '.join(missing)}")
    known = (*needed, *optional)
    if unknown := [key for key in value if key not in known]:
        hint = wire.nearest(unknown[0], known)
        raise _invalid(name, f"key {quoted(unknown[0])} is not known{hint}")
    return value


def _dtype(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in ITEM_SIZE:
        raise _invalid(name, f"dtype must be one of {', '.join(ITEM_SIZE)}, got {quoted(value)}")
    return value


def _shape(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise _malformed(name, "shape must be a list of non-negative integers below 2**63")
    return tuple(value)


def _check_rank(name: str, shape: tuple[int, ...], limits: wire.Limits) -> None:
    if len(shape) > limits.max_rank:
        raise _malformed(name, f"has {len(shape)} dimensions, the limit is {limits.max_rank}")


def _agreed(
    name: str, declared: tuple[int, ...], found: tuple[int, ...], empty: bool
) -> tuple[int, ...]:
    """The declared shape, if the data has it. Lists end at the first 0, or may be left out."""
    if declared == found:
        return declared
    if empty and 0 in declared and found in (declared[: len(found)], (0,)):
        return declared
    said = f"data has shape {list(found)}, but shape says {list(declared)}"
    raise _malformed(name, said[:200])


def _flatten(name: str, data: object) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested lists and their leaves in C order."""
    shape: list[int] = []
    level: list[Any] = [data]
    while level and isinstance(level[0], list):
        if not all(isinstance(item, list) and len(item) == len(level[0]) for item in level):
            raise _invalid(name, f"is ragged: its lists at depth {len(shape) + 1} differ in length")
        shape.append(len(level[0]))
        level = list(itertools.chain.from_iterable(level))
    if any(isinstance(item, list) for item in level):
        raise _invalid(name, f"is ragged: lists and values are mixed at depth {len(shape) + 1}")
    return tuple(shape), level


def _guess_dtype(name: str, flat: list[Any]) -> str:
    if name.rpartition(".")[2] in wire.OFFSETS:
        return "int64"
    return "bool" if all(isinstance(v, bool) for v in flat) else "float32"


def _encode(name: str, dtype: str, flat: list[Any]) -> bytes:
    if dtype in FLOAT_DTYPES:
        return _encode_floats(name, dtype, flat)
    kind, wanted = (int, "integers") if dtype in OFFSET_DTYPES else (bool, "true or false")
    if wrong := [v for v in flat if type(v) is not kind]:
        raise _invalid(name, f"must hold {wanted}, got {quoted(wrong[0])}")
    if dtype == "bool":
        return np.array(flat, np.bool_).tobytes()
    limit = 2 ** (8 * ITEM_SIZE[dtype] - 1)
    if wrong := [v for v in flat if not -limit <= v < limit]:
        raise _invalid(name, f"{quoted(wrong[0])} is beyond {dtype}")
    return np.array(flat, f"<i{ITEM_SIZE[dtype]}").tobytes()


def _encode_floats(name: str, dtype: str, flat: list[Any]) -> bytes:
    kinds = {type(v) for v in flat}
    if str in kinds:
        flat = [_NON_FINITE.get(v, v) if type(v) is str else v for v in flat]
        kinds = {type(v) for v in flat}
    if kinds - {int, float}:
        wrong = next(v for v in flat if type(v) not in (int, float))
        hint = " beside numbers" if isinstance(wrong, bool) else ""
        raise _invalid(name, f"must hold numbers, got {quoted(wrong)}{hint}")
    wide = np.array(flat, np.float64)
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            bits = float64_to_bfloat16_bits(wide)
            finite = (bits & 0x7F80) != 0x7F80
            raw = bits.astype("<u2").tobytes()
        else:
            narrow = wide.astype(f"<f{ITEM_SIZE[dtype]}")
            finite = np.isfinite(narrow)
            raw = narrow.tobytes()
    overflow = np.isfinite(wide) & ~finite
    if overflow.any():
        raise _invalid(name, f"{wide[overflow][0]:g} is beyond {dtype}")
    return raw


def float64_to_bfloat16_bits(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Round to nearest even, once: by way of a float32 rounded to odd, which keeps ties apart."""
    single = wide.astype(np.float32)
    bits = single.view(np.uint32)
    inexact = np.isfinite(wide) & (single.astype(np.float64) != wide)
    towards_zero = bits - (inexact & (np.abs(single.astype(np.float64)) > np.abs(wide)))
    odd = np.where(inexact, towards_zero | 1, bits).astype(np.uint32)
    rounded = (odd + 0x7FFF + ((odd >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)


def _invalid(name: str, message: str) -> Refusal:
    return Refusal("invalid", f"{name}: {message}", field=name, reasons=(f"{name}: {message}",))


def _malformed(name: str, message: str) -> Refusal:
    return Refusal("malformed", f"{name}: {message}", field=name, reasons=(f"{name}: {message}",))

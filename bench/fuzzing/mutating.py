"""A body from a number: examples taken apart, put together wrongly, and damaged byte by byte.

The same number gives the same body, whatever was made before.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashwire import wire
from fuzzing.packing import Pairs, pack, unpack

SCHEMAS: Mapping[str, wire.Schema] = {
    "attention": wire.ATTENTION,
    "backward": wire.BACKWARD,
    "check": wire.CHECK,
    "plan": wire.PLAN,
    "reply": wire.REPLY,
}
_NAMES = sorted(
    {part for schema in SCHEMAS.values() for name in schema.tensors | (schema.options or set())
     for part in name.split(".")}
    | {"request", "mine", "dtype", "shape", "data", "pad", "p", "seed", "meta", "", "q.q"}
)  # fmt: skip
_WORDS = ("float32", "float16", "bfloat16", "float64", "bool", "int32", "int64", "bhld", "blhd",
          "auto", "cpu", "reference", "tf32", "top_left", "NaN", "Infinity")  # fmt: skip
_NUMBERS = (0, 1, 2, 3, 4, 16, 63, 64, 65, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62,
            2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63), 0.0, -0.0, 0.5, 1e-310, 1e308,
            math.inf, -math.inf, math.nan)  # fmt: skip
_MOST_ITEMS, _MOST_ELEMENTS = 200, 4096


@dataclass(frozen=True, slots=True)
class Example:
    """A good body, and the schema (a key of SCHEMAS) that it is for."""

    schema: str
    body: bytes


class Mutator:
    """Bodies made of `examples`, in msgpack and in JSON."""

    def __init__(self, examples: list[Example]) -> None:
        self._examples = examples
        self._trees = [(e.schema, unpack(e.body)) for e in examples]

    def message(self, number: int) -> tuple[str, bytes]:
        """(schema, body in msgpack)."""
        r = random.Random(number)
        how = r.random()
        if how < 0.02:
            return r.choice(list(SCHEMAS)), r.randbytes(r.randint(0, 80))
        if how < 0.35:
            example = r.choice(self._examples)
            schema, body = example.schema, example.body
        else:
            schema, tree = r.choice(self._trees)
            for _ in range(r.randint(0, 3)):
                tree = _changed(tree, r, 0)
            body = pack(tree, r, r.choice((0.0, 0.0, 0.01, 0.1)))
        if how < 0.35 or r.random() < 0.3:
            body = self._damaged(body, r)
        if r.random() < 0.03:
            schema = r.choice(list(SCHEMAS))
        return schema, body

    def json(self, number: int) -> tuple[str, bytes]:
        """(schema, body in JSON)."""
        r = random.Random(number)
        schema, tree = r.choice([t for t in self._trees if t[0] != "reply"])
        for _ in range(r.randint(0, 3)):
            tree = _changed(tree, r, 0)
        body = _as_json(tree, r).encode("utf-8", "surrogatepass")
        if r.random() < 0.4:
            body = self._damaged(body, r)
        return schema, body

    def _damaged(self, body: bytes, r: random.Random) -> bytes:
        data = bytearray(body)
        for _ in range(r.choice((1, 1, 2, 5))):
            _DAMAGES[r.randrange(len(_DAMAGES))](data, r)
        if r.random() < 0.05:
            other = r.choice(self._examples).body
            at = r.randint(0, len(data))
            data[at:] = other[r.randint(0, len(other)) :]
        return bytes(data)


# Bytes


def _flip(data: bytearray, r: random.Random) -> None:
    if data:
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)


def _overwrite(data: bytearray, r: random.Random) -> None:
    if data:
        data[r.randrange(len(data))] = r.choice((0, 0x7F, 0x80, 0x8F, 0x90, 0xC0, 0xC1, 0xC6, 0xDB,
                                                 0xDD, 0xDF, 0xFF, r.randrange(256)))  # fmt: skip


def _insert(data: bytearray, r: random.Random) -> None:
    at = r.randint(0, len(data))
    data[at:at] = r.randbytes(r.randint(1, 6))


def _delete(data: bytearray, r: random.Random) -> None:
    at = r.randint(0, len(data))
    del data[at : at + r.randint(1, 6)]


def _cut(data: bytearray, r: random.Random) -> None:
    del data[r.randint(0, len(data)) :]


def _repeat(data: bytearray, r: random.Random) -> None:
    at, size = r.randint(0, len(data)), r.randint(1, 60)
    data[at:at] = data[at : at + size] * r.choice((1, 1, 20))


_DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip, _overwrite, _insert, _delete, _cut, _repeat,
)  # fmt: skip


# Trees


def _changed(value: Any, r: random.Random, depth: int) -> Any:
    """One thing in it changed; the original stays as it is."""
    if isinstance(value, Pairs) and value.entries and r.random() < 0.9:
        return _changed_map(value, r, depth)
    if isinstance(value, list) and value and r.random() < 0.6:
        at = r.randrange(len(value))
        return [*value[:at], _changed(value[at], r, depth + 1), *value[at + 1 :]]
    if isinstance(value, bytes) and r.random() < 0.7:
        grown = value + r.randbytes(r.randint(1, 8))
        return r.choice((value[: r.randint(0, len(value))], grown, [value], [value, value]))
    return _anything(r, depth)


def _changed_map(value: Pairs, r: random.Random, depth: int) -> Pairs:
    entries, at = list(value.entries), r.randrange(len(value.entries))
    key, item = entries[at]
    how = r.random()
    if how < 0.5:
        entries[at] = (key, _changed(item, r, depth + 1))
    elif how < 0.6:
        entries[at] = (r.choice(_NAMES), item)
    elif how < 0.7:
        del entries[at]
    elif how < 0.75:
        entries.append((key, _anything(r, depth)))
    elif how < 0.9:
        entries.insert(r.randint(0, len(entries)), (r.choice(_NAMES), _anything(r, depth)))
    elif how < 0.95:
        r.shuffle(entries)
    else:
        entries[at] = (_anything(r, depth), item)
    return Pairs(entries)


def _anything(r: random.Random, depth: int) -> Any:
    how = r.randrange(9)
    if how < 3:
        return r.choice(_NUMBERS)
    if how == 3:
        return r.choice((None, True, False))
    if how == 4:
        return r.choice((r.choice(_WORDS), r.choice(_NAMES), "x" * r.choice((0, 40, 70_000))))
    if how == 5:
        return r.randbytes(r.choice((0, 1, 4, 8, 64)))
    if how == 6:
        return [r.choice(_NUMBERS)] * r.choice((0, 1, 2, 4, 9, _MOST_ITEMS))
    if how == 7 and depth < 3:
        return [_anything(r, depth + 1) for _ in range(r.randint(0, 3))]
    if depth >= 3:
        return _nested(r)
    shape = [r.randint(0, 4) for _ in range(r.randint(0, 5))]
    dtype = r.choice(_WORDS[:7])
    data = r.randbytes(math.prod(shape) * wire.ITEM_SIZE[dtype])
    return Pairs([("dtype", dtype), ("shape", shape), ("data", data)])


def _nested(r: random.Random) -> Any:
    value: Any = r.choice(_NUMBERS)
    for _ in range(r.choice((3, 9, 40))):
        value = [value] if r.random() < 0.5 else Pairs([("p", value)])
    return value


# JSON


def _as_json(value: Any, r: random.Random) -> str:
    """Keys may repeat. The data of a tensor become nested lists."""
    if isinstance(value, Pairs):
        value = _with_lists(value, r)
        items = (f"{_json_key(k)}:{_as_json(v, r)}" for k, v in value.entries)
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_as_json(item, r) for item in value) + "]"
    if isinstance(value, bytes):
        return json.dumps(value.hex())
    if isinstance(value, float) and r.random() < 0.05:
        return r.choice(("1e400", "-0", "1E5", "0.1e-7", "123456789012345678901234567890"))
    return json.dumps(value)


def _with_lists(tensor: Pairs, r: random.Random) -> Pairs:
    """A tensor with its data as JSON has them; what is none stays as it is."""
    members = {key: item for key, item in tensor.entries if isinstance(key, str)}
    shape, dtype = _small_shape(members.get("shape")), members.get("dtype")
    if shape is None or not isinstance(members.get("data"), bytes):
        return tensor
    kept = [(k, v) for k, v in tensor.entries if k not in ("pad", "data")]
    return Pairs([*kept, ("data", _lists(shape, _values(dtype, r)))])


def _small_shape(value: Any) -> list[int] | None:
    """It, when it is one, of a tensor that has few elements."""
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        return None
    return value if math.prod(max(1, n) for n in value) <= _MOST_ELEMENTS else None


def _values(dtype: object, r: random.Random) -> Iterator[Any]:
    """Of a tensor's elements; integers rise, as offsets do."""
    for number in itertools.count():
        if dtype == "bool":
            yield r.random() < 0.7
        else:
            yield number if str(dtype).startswith("int") else r.uniform(-2, 2)


def _lists(shape: list[int], values: Iterator[Any]) -> Any:
    if not shape:
        return next(values)
    return [_lists(shape[1:], values) for _ in range(shape[0])]


def _json_key(key: Any) -> str:
    return json.dumps(key if isinstance(key, str) else str(key))

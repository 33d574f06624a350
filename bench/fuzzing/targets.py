"""The wire decoder, and what must hold of what it says, whatever the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from flashwire import wire
from fuzzing.mutating import SCHEMAS

MAX_BODY = 2**20
_LIMITS = wire.Limits(max_message=MAX_BODY)
_CODES = ("malformed", "invalid", "too_large")
_LONGEST_DETAIL = 20_000
Cuts = list[int]


class Broken(Exception):
    """Something that must hold does not."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


def decoded(schema_name: str, data: bytes, cuts: Cuts) -> str:
    """Whether it was "read", or the code of the refusal: the same whole and in pieces. What is
    read, msgpack reads in the same way. Raises Broken, or whatever escapes the decoder.
    """
    schema = SCHEMAS[schema_name]
    whole = _outcome(schema, data, [])
    pieces = _outcome(schema, data, cuts)
    require(_agree(pieces, whole), f"in pieces {pieces}, whole {whole}")
    if not isinstance(whole, wire.Message):
        code, field, detail = whole
        require(code in _CODES, f"code {code}")
        require(field is None or len(field) <= 200, "a long field")
        require(len(detail) < _LONGEST_DETAIL, f"a detail of {len(detail)} characters")
        return code
    check_places(whole.tensors, len(data), payload=schema.payload)
    options, tensors = _as_msgpack_reads(data, schema)
    require(repr(whole.options) == repr(options), f"options {whole.options}, msgpack {options}")
    require(whole.tensors.keys() == tensors.keys(), f"tensors {list(whole.tensors)}")
    for name, ref in whole.tensors.items():
        found = b"".join(data[at : at + n] for at, n in ref.segments)
        require((ref.dtype, ref.shape, found) == tensors[name], f"{name} reads otherwise")
    return "read"


Outcome = wire.Message | tuple[str, str | None, str]


def _outcome(schema: wire.Schema, data: bytes, cuts: Cuts) -> Outcome:
    decoder = wire.Decoder(schema, _LIMITS)
    view = memoryview(data)
    try:
        for filled in cuts:
            decoder.advance(view, min(filled, len(data)))
        decoder.advance(view, len(data), final=True)
    except wire.WireError as error:
        return error.code, error.field, error.detail
    return decoder.message


def _agree(pieces: Outcome, whole: Outcome) -> bool:
    """NaN differs from itself. What claims more than may come is refused while more may come, and
    truncated once it is known that nothing does.
    """
    if repr(pieces) == repr(whole):
        return True
    said = "" if isinstance(whole, wire.Message) else whole[2]
    return not isinstance(pieces, wire.Message) and pieces[0] == "too_large" and "truncated" in said


def check_places(tensors: Mapping[str, wire.TensorRef], size: int, *, payload: bool = True) -> None:
    """Every tensor has the bytes that its header says, inside the `size` bytes there are."""
    for name, ref in tensors.items():
        require(all(n > 0 and 0 <= at <= at + n <= size for at, n in ref.segments), f"{name} out")
        expected = ref.header.nbytes if payload else 0
        require(ref.nbytes == expected, f"{name}: {ref.nbytes} bytes for {ref.header}")
        require(all(n >= 0 for n in ref.shape), f"{name}: shape {ref.shape}")


def _as_msgpack_reads(data: bytes, schema: wire.Schema) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}

    def options_of(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for key, value in tree.items():
            name = prefix + key
            if name in schema.tensors and isinstance(value, dict):
                raw = value.get("data", b"")
                raw = b"".join(raw) if isinstance(raw, list) else raw
                tensors[name] = value["dtype"], tuple(value["shape"]), raw
            elif name in schema.groups and isinstance(value, dict):
                options[key] = options_of(value, name + ".")
            elif name not in schema.tensors | schema.groups or value is not None:
                options[key] = value
        return options

    return options_of(msgpack.unpackb(data), ""), tensors

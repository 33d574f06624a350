"""What reads bodies, and what must hold of what it says, whatever the body.

Each target returns a word for the outcome and raises Broken, or whatever escapes, for a fault.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import msgpack
from starlette.requests import Request

from flashwire import wire
from flashwire_kernels.validation import Problem
from flashwire_service.errors import Refusal
from flashwire_service.front import body, checks, planning
from flashwire_service.front.message import Message
from flashwire_service.ipc import frames
from flashwire_service.ipc.memory import Memory
from flashwire_service.settings import Settings
from fuzzing.mutating import SCHEMAS

SETTINGS = Settings(max_body_bytes=2**20, residual_bytes=2**20)
_LIMITS = wire.Limits(max_message=SETTINGS.max_body_bytes)
_CODES = ("malformed", "invalid", "too_large")
_REFUSALS = (*_CODES, "unsupported_backend", "unsupported_media_type")
_LONGEST_DETAIL = 20_000
Cuts = list[int]


class Broken(Exception):
    """Something that must hold does not."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


# The decoder


def decoded(schema_name: str, data: bytes, cuts: Cuts) -> str:
    """The wire decoder: whole and in pieces alike; what it accepts, msgpack reads as it does."""
    schema = SCHEMAS[schema_name]
    whole = _outcome(schema, data, [])
    pieces = _outcome(schema, data, cuts)
    require(pieces == whole or _same(pieces, whole), f"in pieces {pieces}, whole {whole}")
    if not isinstance(whole, wire.Message):
        code, field, detail = whole
        require(code in _CODES, f"code {code}")
        require(field is None or len(field) <= 200, "a long field")
        require(len(detail) < _LONGEST_DETAIL, f"a detail of {len(detail)} characters")
        return code
    _check_places(whole, schema, len(data))
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


def _same(a: Outcome, b: Outcome) -> bool:
    """NaN differs from itself."""
    return repr(a) == repr(b)


def _check_places(message: wire.Message, schema: wire.Schema, size: int) -> None:
    for name, ref in message.tensors.items():
        require(all(n > 0 and 0 <= at <= at + n <= size for at, n in ref.segments), f"{name} out")
        expected = ref.header.nbytes if schema.payload else 0
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


# The front end, from a body to a job


async def job(
    schema_name: str, data: bytes, cuts: Cuts, media_type: str
) -> tuple[str, frames.Job | None]:
    """(the outcome, the job that a worker would get)."""
    request = _request(data, cuts, media_type)
    try:
        message = await body.read(request, SETTINGS, SCHEMAS[schema_name])
    except Refusal as refusal:
        return _code(refusal), None
    try:
        options, problem = _checked(schema_name, message)
        if schema_name == "plan":
            planning.plan(options, problem, message, {})
            return "planned", None
        _check_places(wire.Message({}, message.tensors), SCHEMAS[schema_name], message.size)
        return "accepted", _job(schema_name, options, message)
    except Refusal as refusal:
        return _code(refusal), None
    finally:
        message.close()


def _request(data: bytes, cuts: Cuts, media_type: str) -> Request:
    headers = [(b"content-type", media_type.encode())]
    if len(cuts) % 2:  # the others come in chunks, and do not say how many
        headers.append((b"content-length", str(len(data)).encode()))
    ends = [*(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *ends])]
    events = _events(pieces)

    async def receive() -> dict[str, Any]:
        return next(events)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    return Request(scope, receive)


def _events(pieces: list[bytes]) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(pieces, start=1):
        yield {"type": "http.request", "body": piece, "more_body": number < len(pieces)}


def _checked(schema_name: str, message: Message) -> tuple[Any, Any]:
    if schema_name == "plan":
        return checks.plan(message)
    if schema_name == "backward" and message.options.get("residual") is not None:
        return checks.backward_by_residual(message), None
    checked = getattr(checks, schema_name)(message)
    _require_sound(checked.problem)
    return checked.options, checked.problem


def _require_sound(problem: Problem) -> None:
    require(problem.heads_q % max(1, problem.heads_kv) == 0, "heads do not divide")
    require(math.isfinite(problem.scale), "the scale is not finite")


def _code(refusal: Refusal) -> str:
    require(refusal.code in _REFUSALS, f"{refusal.code}: {refusal.detail}")
    require(len(refusal.detail) < 10**6, f"a detail of {len(refusal.detail)} characters")
    return refusal.code


def _job(route: str, options: dict[str, Any], message: Message) -> frames.Job:
    """Packed and unpacked: what a worker would see."""
    inline = message.body if isinstance(message.body, bytes) else bytes(message.body.view)
    made = frames.Job(
        id=1, route=route, options=dict(options), size=message.size, body=inline,
        tensors={
            name: frames.TensorSlot(ref.dtype, ref.shape, ref.segments)
            for name, ref in message.tensors.items()
        },
    )  # fmt: skip
    seen = frames.decode(frames.encode(made))
    require(isinstance(seen, frames.Job), "a job became another frame")
    require(not isinstance(message.body, Memory) or message.size > 0, "empty memory")
    return seen  # type: ignore[return-value]

"""A short run of the fuzzer, whose long one is `make fuzz`: the same bodies every time."""

from __future__ import annotations

import asyncio

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwire import wire
from flashwire.wire.cursor import Cursor
from fuzzing import targets
from fuzzing.examples import examples
from fuzzing.fuzzer import Fuzzer
from fuzzing.mutating import SCHEMAS, Mutator

BODIES = 2000


def test_bodies_that_nobody_would_send() -> None:
    fuzzer = Fuzzer(examples(), every=8)

    async def run() -> None:
        for number in range(BODIES):
            await fuzzer.one(number)

    asyncio.run(run())
    found = fuzzer.outcomes
    assert found["decoder"].total() == BODIES
    for stage, outcomes in (
        ("decoder", {"malformed", "invalid", "read"}),
        ("msgpack to job", {"malformed", "invalid", "accepted", "answered"}),
        ("JSON to job", {"malformed", "invalid", "accepted", "answered"}),
        ("msgpack computed", {"computed", "invalid", "unsupported_backend"}),
        ("JSON computed", {"computed"}),
    ):
        assert outcomes <= found[stage].keys(), stage  # else it is not told how these fail


@given(st.binary(max_size=120), st.lists(st.integers(0, 120), max_size=4), st.sampled_from(
    sorted(SCHEMAS)
))  # fmt: skip
@settings(max_examples=400)
def test_any_bytes(data: bytes, cuts: list[int], schema: str) -> None:
    targets.decoded(schema, data, sorted(cuts))


def test_the_same_number_is_the_same_body() -> None:
    mutator = Mutator(examples())
    assert [mutator.message(n) for n in range(50)] == [
        Mutator(examples()).message(n) for n in range(50)
    ]
    assert mutator.json(7) == Mutator(examples()).json(7)
    assert len({mutator.message(n) for n in range(500)}) > 450


# What it would find


def test_a_misread_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Cursor.key
    monkeypatch.setattr(
        Cursor, "key", lambda self, where: read(self, where).replace("causal", "scale")
    )
    with pytest.raises(targets.Broken, match="msgpack"):
        targets.decoded("attention", msgpack.packb({"causal": True}), [])


def test_a_depth_without_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Cursor.value
    monkeypatch.setattr(Cursor, "value", lambda self, where, depth: read(self, where, 0))
    with pytest.raises(RecursionError):
        targets.decoded("attention", b"\x81\xa5scale" + b"\x91" * 3000 + b"\xc0", [])


def test_a_reading_that_depends_on_the_pieces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = wire.Decoder.advance

    def forgetful(
        self: wire.Decoder, view: memoryview, filled: int, *, final: bool = False
    ) -> bool:
        return advance(self, view, filled, final=final or filled > 3)

    monkeypatch.setattr(wire.Decoder, "advance", forgetful)
    with pytest.raises(targets.Broken, match="in pieces"):
        targets.decoded("attention", msgpack.packb({"causal": True}), [5])

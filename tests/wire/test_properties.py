"""Whatever is sent: messages come back as they were, in any pieces; the rest is a WireError."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwire import wire

SCHEMAS = (wire.ATTENTION, wire.BACKWARD, wire.CHECK, wire.PLAN, wire.REPLY)
options = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.floats(allow_nan=False),
        "causal": st.just(True),
        "window": st.tuples(st.none() | st.integers(0, 2**40), st.integers(0, 300)).map(list),
        "dropout": st.fixed_dictionaries(
            {"p": st.floats(0.1, 0.9), "seed": st.integers(0, 2**64 - 1)}
        ),
        "layout": st.text(max_size=40),
        "backend": st.sampled_from(("cpu", "reference")),
    },
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[wire.Header, memoryview]:
    dtype = draw(st.sampled_from(sorted(wire.ITEM_SIZE)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    header = wire.Header(dtype, shape)
    return header, memoryview(draw(st.binary(min_size=header.nbytes, max_size=header.nbytes)))


@st.composite
def messages(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, tuple[wire.Header, memoryview]]]:
    names = draw(st.lists(st.sampled_from(sorted(wire.ATTENTION.tensors)), unique=True))
    return draw(options), {name: draw(tensors()) for name in names}


def outcome(data: bytes, schema: wire.Schema, cuts: list[int]) -> object:
    """The message, or the refusal, of bytes that arrive in pieces ending at `cuts`."""
    decoder = wire.Decoder(schema)
    try:
        for filled in sorted(cut for cut in cuts if cut < len(data)):
            decoder.advance(memoryview(data), filled)
        decoder.advance(memoryview(data), len(data), final=True)
    except wire.WireError as error:
        return error.code, error.field, error.detail
    return decoder.message


@given(messages())
def test_round_trip(message: Any) -> None:
    given_options, given_tensors = message
    data = wire.encode(given_options, given_tensors)
    found = wire.decode(data, wire.ATTENTION)
    assert found.options == given_options
    assert {
        name: (ref.header, b"".join(data[a : a + n] for a, n in ref.segments))
        for name, ref in found.tensors.items()
    } == {name: (header, bytes(raw)) for name, (header, raw) in given_tensors.items()}


@given(messages(), st.lists(st.integers(0, 2000), max_size=20))
def test_any_pieces_give_the_same_message(message: Any, cuts: list[int]) -> None:
    data = wire.encode(*message)
    assert outcome(data, wire.ATTENTION, cuts) == wire.decode(data, wire.ATTENTION)


@given(messages(), st.lists(st.integers(0, 2000), max_size=4), st.data())
@settings(max_examples=300)
def test_mutations_are_read_or_refused_alike(message: Any, cuts: list[int], draw: Any) -> None:
    data = bytearray(wire.encode(*message))
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data)))
        kind = draw.draw(st.sampled_from(("flip", "cut", "insert", "drop")))
        if kind == "flip" and at < len(data):
            data[at] = draw.draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw.draw(st.binary(max_size=6))
        else:
            del data[at : at + draw.draw(st.integers(1, 6))]
    whole = outcome(bytes(data), wire.ATTENTION, [])
    assert outcome(bytes(data), wire.ATTENTION, cuts) == whole
    if isinstance(whole, wire.Message):
        ends = [a + n for ref in whole.tensors.values() for a, n in ref.segments]
        assert all(end <= len(data) for end in ends)
        assert all(ref.nbytes == ref.header.nbytes for ref in whole.tensors.values())


@given(st.binary(max_size=60), st.sampled_from(SCHEMAS))
@settings(max_examples=300)
def test_noise_is_read_or_refused(data: bytes, schema: wire.Schema) -> None:
    outcome(data, schema, [len(data) // 2])


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(("dtype", "shape", "data", "pad", "q")), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(("q", "mask", "request", "mine", "scale")), json_like))
@settings(max_examples=150)
def test_any_structure_is_read_or_refused(value: Any) -> None:
    data = msgpack.packb(value)
    for schema in SCHEMAS:
        outcome(data, schema, [])


@pytest.mark.parametrize("value", [[1000] * 20_000, [[1] * 7] * 6000, ["abc"] * 15_000])
def test_a_slow_drip_costs_few_looks(value: Any) -> None:
    """One byte at a time, what has arrived is looked at some dozen times, not at every byte."""
    data = msgpack.packb({"scale": value, "causal": True})
    decoder = wire.Decoder(wire.ATTENTION)
    needs = set()
    for filled in range(len(data)):
        assert not decoder.advance(memoryview(data), filled)
        needs.add(decoder.need)
    assert decoder.advance(memoryview(data), len(data))
    assert len(needs) < 60

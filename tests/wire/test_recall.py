"""What is recalled is what reading would have told."""

from __future__ import annotations

import numpy as np
import pytest

from flashwire import wire
from flashwire.wire import recall as recalling

LIMITS = wire.Limits()


def message(options: dict[str, object], fill: int = 0, **shapes: tuple[int, ...]) -> bytes:
    tensors = {}
    for name, shape in shapes.items():
        data = np.full(shape, fill, np.float32)
        tensors[name] = wire.Header("float32", shape), memoryview(data).cast("B")
    return wire.encode(options, tensors)


@pytest.fixture
def counted(monkeypatch):
    """How many messages were read."""
    read = []

    def decode(data, schema, limits):
        read.append(data)
        return wire.decode(data, schema, limits)

    monkeypatch.setattr(recalling, "decode", decode)
    return read


QKV = {"q": (2, 3, 4, 8), "k": (2, 3, 5, 8), "v": (2, 3, 5, 8)}


def test_other_payloads_are_not_read_again(counted):
    recall = wire.Recall()
    for fill in range(5):
        data = message({"causal": True, "window": [3, None]}, fill, **QKV)
        assert recall.decode(data, wire.ATTENTION, LIMITS) == wire.decode(data, wire.ATTENTION)
    assert len(counted) == 1


def test_any_other_byte_is_read(counted):
    """As by a reader that recalls nothing: the same message, or the same error."""
    rng = np.random.default_rng(5)
    data = message({"causal": True, "scale": 0.25}, 1, q=(1, 2), k=(1, 2), v=(1, 2))
    inside = {
        at
        for ref in wire.decode(data, wire.ATTENTION).tensors.values()
        for offset, length in ref.segments
        for at in range(offset, offset + length)
    }
    for at in range(len(data)):
        for bits in (1, 0x80, int(rng.integers(1, 256))):
            recall, other = wire.Recall(), bytearray(data)
            recall.decode(data, wire.ATTENTION, LIMITS)
            other[at] ^= bits
            counted.clear()
            assert outcome(recall.decode, bytes(other)) == outcome(wire.decode, bytes(other))
            assert len(counted) == (at not in inside)


def outcome(decode, data):
    try:
        return decode(data, wire.ATTENTION, LIMITS)
    except wire.WireError as error:
        return str(error), error.code, error.field


def test_other_limits_or_another_schema_recall_nothing(counted):
    recall, data = wire.Recall(), message({}, **QKV)
    recall.decode(data, wire.ATTENTION, LIMITS)
    with pytest.raises(wire.WireError, match="elements"):
        recall.decode(data, wire.ATTENTION, wire.Limits(max_elements=10))
    recall.decode(data, wire.BACKWARD, LIMITS)
    assert len(counted) == 3


def test_what_is_changed_afterwards_is_a_copy():
    recall = wire.Recall()
    data = message({"dropout": {"p": 0.5, "seed": None}}, **QKV)
    for _ in range(3):
        found = recall.decode(data, wire.ATTENTION, LIMITS)
        assert found == wire.decode(data, wire.ATTENTION)
        found.options["dropout"]["seed"] = 7
        found.tensors.clear()


def test_few_are_kept(counted):
    recall = wire.Recall(sizes=2)
    messages = [message({}, q=(n, 64), k=(1, 64), v=(1, 64)) for n in (1, 2, 3)]
    for data in (*messages, *messages[1:], messages[0]):
        recall.decode(data, wire.ATTENTION, LIMITS)
    assert [len(data) for data in counted] == [len(messages[n]) for n in (0, 1, 2, 0)]
    alike = [message({"scale": n + 0.5}, **QKV) for n in range(20)]
    for data in alike:
        recall.decode(data, wire.ATTENTION, LIMITS)
    assert len(recall._known[len(alike[0])]) == 8


def test_long_texts_are_not_kept(counted):
    recall = wire.Recall()
    offsets = list(range(5000))
    data = message({"cu_seqlens_q": offsets}, q=(1, 8))
    for _ in range(2):
        recall.decode(data, wire.ATTENTION, LIMITS)
    assert len(counted) == 2

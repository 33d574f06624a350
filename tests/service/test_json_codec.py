"""JSON requests: the forms of a tensor, rounding, and everything that is refused."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwire import wire
from flashwire_service.errors import Refusal
from flashwire_service.front import json_codec
from flashwire_service.front.message import Message

DTYPES = {"bool": "?", "float16": "<f2", "float32": "<f4", "float64": "<f8", "int64": "<i8",
          "int32": "<i4", "bfloat16": ml_dtypes.bfloat16}  # fmt: skip


def decode(
    body: Any,
    schema: wire.Schema = wire.ATTENTION,
    limits: wire.Limits = wire.Limits(),  # noqa: B008  # frozen
) -> Message:
    text = body if isinstance(body, (bytes, str)) else json.dumps(body)
    body = text if isinstance(text, bytes) else text.encode()
    return json_codec.decode(body, schema, limits)


def array(message: Message, name: str) -> np.ndarray[Any, Any]:
    ref = message.tensors[name]
    assert isinstance(message.body, bytes)
    raw = b"".join(message.body[at : at + size] for at, size in ref.segments)
    return np.frombuffer(raw, DTYPES[ref.dtype]).reshape(ref.shape)


def tensor(value: Any, name: str = "q") -> np.ndarray[Any, Any]:
    return array(decode({name: value}), name)


def refused(body: Any, schema: wire.Schema = wire.ATTENTION) -> Refusal:
    with pytest.raises(Refusal) as caught:
        decode(body, schema)
    return caught.value


def test_nested_lists_are_float32() -> None:
    got = tensor([[1, 2.5], [-0.0, 1e-3]])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array([[1, 2.5], [-0.0, 1e-3]], np.float32))
    assert np.signbit(got[1, 0])


def test_all_booleans_are_bool_and_offsets_int64() -> None:
    assert tensor([[True, False]], "mask").dtype == np.bool_
    assert tensor([0, 3], "cu_seqlens_q").dtype == np.int64
    assert tensor([1, 0], "mask").dtype == np.float32  # never guessed to be a mask


def test_options_stay_options_and_payloads_are_aligned() -> None:
    message = decode({"causal": True, "q": [1], "window": [1, None], "k": [[2, 3]]})
    assert message.options == {"causal": True, "window": [1, None]}
    assert message.tensors["q"].segments == ((0, 4),)
    assert message.tensors["k"].segments == ((64, 8),)


def test_non_finite_values_are_strings() -> None:
    got = tensor(["NaN", "Infinity", "-Infinity", 1])
    np.testing.assert_array_equal(got, np.array([np.nan, np.inf, -np.inf, 1], np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rounding_is_to_nearest_even_once(dtype: str) -> None:
    values = [0.01, 1.0, -2.5, 1 / 3, 6e-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8,
              1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, -(1 + 2**-8 + 2**-30), 1e-40]  # fmt: skip
    got = tensor({"dtype": dtype, "data": values}).astype(np.float64)
    for value, rounded in zip(values, got, strict=True):
        assert rounded == nearest_even(value, dtype), value


def nearest_even(value: float, dtype: str) -> float:
    """Rounding by exact integers: bits of precision and least exponent of each dtype."""
    bits, least = {"float16": (11, -14), "bfloat16": (8, -126), "float32": (24, -126),
                   "float64": (53, -1022)}[dtype]  # fmt: skip
    if value == 0:
        return value
    exponent = max(np.frexp(value)[1] - 1, least)
    quantum = 2.0 ** (int(exponent) - bits + 1)
    return round(value / quantum) * quantum


def test_bfloat16_bits_of_a_known_value() -> None:
    message = decode({"q": {"dtype": "bfloat16", "data": [0.01]}})
    assert message.body == (0x3C24).to_bytes(2, "little")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float16", 65520), ("float16", -1e6), ("bfloat16", 3.4e38), ("float32", 1e39),
     ("float32", -(10**300)), ("int32", 2**31), ("int64", 2**63), ("int64", -(2**63) - 1)],
)  # fmt: skip
def test_overflow_names_the_tensor(dtype: str, value: float) -> None:
    refusal = refused({"q": {"dtype": dtype, "data": [0, value]}})
    assert (refusal.code, refusal.field) == ("invalid", "q")
    assert dtype in refusal.detail


def test_the_largest_values_are_no_overflow() -> None:
    assert tensor({"dtype": "float16", "data": [65519.99]})[0] == 65504
    assert tensor({"dtype": "bfloat16", "data": [3.39e38, "Infinity"]})[1] == np.inf
    assert tensor({"dtype": "int64", "data": [2**63 - 1, -(2**63)]})[0] == 2**63 - 1


def test_shape_is_needed_without_elements_and_may_be_given_with() -> None:
    for data in ([], [[], []]):
        got = tensor({"dtype": "float16", "shape": [2, 0, 4], "data": data})
        assert got.shape == (2, 0, 4)
    assert tensor({"dtype": "float32", "shape": [1, 2], "data": [[1, 2]]}).shape == (1, 2)
    for empty in ([], [[]], {"dtype": "float32", "data": []}):
        assert refused({"q": empty}).code == "invalid"


@pytest.mark.parametrize(
    "shape", [[-1, 4], [1.5], [True, 4], "-1", [2**63], {"a": 1}, [1] * 9, ["2"], [[2]]]
)
def test_a_shape_that_is_none(shape: Any) -> None:
    refusal = refused({"q": {"dtype": "float32", "shape": shape, "data": [1, 2]}})
    assert (refusal.code, refusal.field) == ("malformed", "q")


@pytest.mark.parametrize(
    ("shape", "data"),
    [([2], [1, 2, 3]), ([3, 1], [1, 2, 3]), ([2, 0], [[1]]), ([0], [1]), ([2, 2], []),
     ([2, 0, 3], [[], [], []])],
)  # fmt: skip
def test_data_must_have_the_declared_shape(shape: list[int], data: Any) -> None:
    refusal = refused({"q": {"dtype": "float32", "shape": shape, "data": data}})
    assert (refusal.code, refusal.field) == ("malformed", "q")


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2], [3]],
        [[1], 2],
        [1, [2]],
        [1, True],
        [True, None],
        [1, "nan"],
        [{}],
        "1",
        3,
        True,
        {"dtype": "float32"},
        {"data": [1]},
        {"dtype": "f4", "data": [1]},
        {"dtype": ">f4", "data": [1]},
        {"dtype": ["float32"], "data": [1]},
        {"dtype": "float32", "data": [1], "extra": 1},
        {"dtype": "bool", "data": [0]},
        {"dtype": "bool", "data": [1]},
        {"dtype": "int64", "data": [1.0]},
        {"dtype": "int64", "data": [True]},
        {"dtype": "float32", "data": "1"},
    ],
)
def test_what_is_no_tensor_is_named(value: Any) -> None:
    refusal = refused({"q": value})
    assert (refusal.code, refusal.field) == ("invalid", "q")
    assert refusal.detail.startswith("q: ")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", "null", "\"q\"", "{} {}", "{'q': 1}", '{"q": [1,]}', "\ufeff{}",
        '{"scale": NaN}', '{"scale": Infinity}', '{"scale": -Infinity}', '{"q": [NaN]}',
        '{"scale": 1e999}', '{"scale": ' + "9" * 400 + "}", '{"scale": ' + "9" * 5000 + "}",
        '{"q": ' + "[" * 40 + "1" + "]" * 40 + "}", '{"q": ' + "[" * 200_000,
        '{"a": "' + "\\" * 3, '{"scale": 01}',
    ],
)  # fmt: skip
def test_what_is_no_json_of_ours(text: str) -> None:
    assert refused(text).code == "malformed"


def test_bytes_that_are_no_utf8() -> None:
    assert refused(b'{"q": "\xff"}').code == "malformed"
    assert refused('{"q": [1]}'.encode("utf-16")).code == "malformed"


@pytest.mark.parametrize("piece", ['\\"', "\\\\", "a", '"', '"\\'])
def test_a_string_without_an_end_is_read_once(piece: str) -> None:
    """Were every quote tried as a beginning, the test's own time limit would end this."""
    assert refused('{"a": "' + piece * (900_000 // len(piece))).code == "malformed"


def test_nesting_behind_an_escape_counts() -> None:
    assert "nested" in refused('{"a": "\\\\", "b": ' + "[" * 100 + "]" * 100 + "}").detail


def test_brackets_in_strings_are_no_nesting() -> None:
    deep = '"' + "[{" * 100 + '\\"[" '
    assert decode('{"layout": ' + deep + "}").options["layout"].startswith("[{[{")


@pytest.mark.parametrize(
    "text",
    ['{"causal": false, "causal": true}', '{"q": {"dtype": "float32", "data": [1], "data": [2]}}',
     '{"dropout": {"p": 0, "p": 1}}'],
)  # fmt: skip
def test_a_repeated_key_is_named(text: str) -> None:
    refusal = refused(text)
    assert refusal.code == "malformed"
    assert refusal.field in ("causal", "data", "p")


def test_null_is_an_absent_tensor() -> None:
    assert decode({"mask": None, "q": [1]}).tensors.keys() == {"q"}


def test_tensors_of_a_check_have_dotted_names() -> None:
    message = decode(
        {"request": {"q": [1], "causal": True}, "mine": {"out": [2]}, "dout": [3]}, wire.CHECK
    )
    assert set(message.tensors) == {"request.q", "mine.out", "dout"}
    assert message.options == {"request": {"causal": True}, "mine": {}}
    assert decode({"request.q": [1]}, wire.CHECK).tensors == {}


def test_a_plan_has_headers_only() -> None:
    message = decode(
        {"q": {"dtype": "float16", "shape": [2**40, 8]}, "cu_seqlens_q": [0, 1]}, wire.PLAN
    )
    assert message.tensors["q"] == wire.TensorRef("float16", (2**40, 8))
    assert message.options == {"cu_seqlens_q": [0, 1]}
    body = {"q": {"dtype": "float16", "shape": [1], "data": [1]}}
    assert refused(body, wire.PLAN).field == "q"

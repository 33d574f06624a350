"""One spelling for each meaning of an option, whatever the caller wrote."""

from typing import Any

import numpy as np
import pytest

from flashwire import errors, wire


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"scale": 1}, {"scale": 1.0}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"scale": np.int64(2)}, {"scale": 2.0}),
        ({"scale": np.array(0.5)}, {"scale": 0.5}),
        ({"scale": 0}, {"scale": 0.0}),
        ({"scale": None}, {}),
        ({"causal": False}, {}),
        ({"causal": np.bool_(True)}, {"causal": True}),
        ({"window": (3, -1)}, {"window": [3, None]}),
        ({"window": (np.int32(3), 0)}, {"window": [3, 0]}),
        ({"window": (None, -1)}, {}),
        ({"softcap": 0}, {}),
        ({"softcap": 30}, {"softcap": 30.0}),
        ({"dropout": {"p": 0, "seed": None}}, {}),
        ({"dropout": {"p": 1, "seed": None}}, {"dropout": {"p": 1.0}}),
        ({"dropout": {"p": 0, "seed": 7}}, {"dropout": {"p": 0.0, "seed": 7}}),
        ({"layout": "bhld", "precision": "ieee", "backend": "auto", "version": 1}, {}),
        ({"causal_align": "bottom_right", "return_lse": False, "bias_grad": False}, {}),
        ({"backends": ("cpu", "reference")}, {"backends": ["cpu", "reference"]}),
    ],
)
def test_forms(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = wire.canonical(given)
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(v) for v in wanted.values()]


@pytest.mark.parametrize(
    "given",
    [{"causal": 0}, {"scale": True}, {"scale": "1"}, {"window": [2.5, 1]}, {"softcap": False}],
)
def test_wrong_types_are_left_for_the_server_to_name(given: dict[str, Any]) -> None:
    found = wire.canonical(given)
    assert found == given
    assert [type(v) for v in found.values()] == [type(v) for v in given.values()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"causl": True}, "causl: is not an option"),
        ({"scale": object()}, "scale: cannot be a object"),
        ({"scale": 1j}, "scale: cannot be a complex"),
        ({"window": "ab"}, "window: must be a pair"),
        ({"window": 5}, "window: must be a pair"),
        ({"window": [1, 2, 3]}, "window: must be a pair (left, right), got 3"),
        ({"window": (1, object())}, "window: cannot be a object"),
        ({"dropout": {"p": 0.1, "seed": 2**64}}, "dropout.seed: 18446744073709551616 does not fit"),
        ({"dropout": {"p": 0.1, "sed": 1}}, "dropout: must be a map of p and seed"),
        ({"backends": "cpu"}, "backends: must be a list"),
    ],
)
def test_what_no_message_can_carry(given: dict[str, Any], words: str) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.canonical(given)
    assert caught.value.code == "invalid"
    assert str(caught.value).startswith(words)


def test_every_option_has_a_form_and_a_place() -> None:
    names = {
        name.rpartition(".")[2]
        for schema in (wire.ATTENTION, wire.BACKWARD, wire.CHECK, wire.PLAN)
        for name in schema.options or ()
    }
    assert names == set(wire.OPTION_ORDER)
    for name in names:
        assert wire.canonical({name: None}) == {}


def test_codes_of_the_wire_are_codes_of_the_contract() -> None:
    assert {"malformed", "invalid", "too_large"} <= set(errors.STATUS)

"""AttentionSpec: every violation named, equal meanings equal values."""

import dataclasses
import math

import pytest

from flashwire_kernels.errors import InvalidAttention
from flashwire_kernels.types import AttentionSpec, TensorHeader

WRONG = [
    ("scale", math.nan, "must be finite"),
    ("scale", math.inf, "must be finite"),
    ("scale", 10**400, "must be finite, got an integer of 1329 bits"),
    ("scale", "1", "must be a number, got str"),
    ("scale", True, "must be a number, got bool"),
    ("causal", 1, "must be true or false, got int"),
    ("causal", None, "must be true or false, got NoneType"),
    ("causal_align", "bottom-right", "must be one of 'bottom_right', 'top_left'"),
    ("causal_align", None, "must be one of"),
    ("window", 5, "must be a pair"),
    ("window", (1, 2, 3), "must be a pair"),
    ("window", (-2, 0), "left must be at least -1 (open), got -2"),
    ("window", (0, -7), "right must be at least -1 (open), got -7"),
    ("window", (1.0, 0), "left must be an integer or null, got 1.0"),
    ("window", (0, True), "right must be an integer or null, got True"),
    ("softcap", -1.0, "must be at least 0, got -1.0"),
    ("softcap", math.nan, "must be finite"),
    ("softcap", [30], "must be a number, got list"),
    ("layout", ["bhld"], "must be one of 'bhld', 'blhd', got ['bhld']"),
    ("layout", "bshd", "must be one of 'bhld', 'blhd'"),
    ("precision", "fp16", "must be one of 'ieee', 'tf32'"),
]
WRONG_DROPOUT = [
    ({"dropout_p": 1.0, "dropout_seed": 1}, "p must be in [0, 1), got 1.0"),
    ({"dropout_p": -0.1, "dropout_seed": 1}, "p must be in [0, 1), got -0.1"),
    ({"dropout_p": math.nan, "dropout_seed": 1}, "p must be in [0, 1), got nan"),
    ({"dropout_p": True, "dropout_seed": 1}, "p must be a number, got bool"),
    ({"dropout_p": "0.1", "dropout_seed": 1}, "p must be a number, got str"),
    ({"dropout_p": 0.1}, "a seed is needed"),
    ({"dropout_p": 0.1, "dropout_seed": -1}, "seed must be an integer in [0, 2**64), got -1"),
    ({"dropout_p": 0.1, "dropout_seed": 2**64}, "seed must be an integer in [0, 2**64)"),
    ({"dropout_p": 0.1, "dropout_seed": 1.0}, "seed must be an integer in [0, 2**64), got 1.0"),
    ({"dropout_p": 0.1, "dropout_seed": True}, "seed must be an integer in [0, 2**64), got True"),
]


def violations(**options):
    with pytest.raises(InvalidAttention) as caught:
        AttentionSpec(**options)
    return [(v.field, v.message) for v in caught.value.violations]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_each_violation(field, value, message):
    [(named, text)] = violations(**{field: value})
    assert named == field
    assert message in text


@pytest.mark.parametrize(("options", "message"), WRONG_DROPOUT)
def test_each_violation_of_dropout(options, message):
    [(named, text)] = violations(**options)
    assert named == "dropout"
    assert message in text


def test_messages_stay_short():
    huge = 10**5000  # Python would refuse to print it
    found = violations(causal_align="x" * 10**6, scale=huge, window=(-huge, 0), dropout_seed=huge)
    assert len(found) == 4
    assert max(len(text) for _, text in found) < 200


def test_every_violation_at_once():
    found = violations(scale="x", causal=2, window=(-2, -3), softcap=-1, dropout_p=2, layout="?")
    assert [field for field, _ in found] == [
        "scale",
        "causal",
        "window",
        "window",
        "softcap",
        "dropout",
        "layout",
    ]


@pytest.mark.parametrize(("one", "other"), [
    ({"window": (-1, -1)}, {}),
    ({"window": (None, None)}, {}),
    ({"window": [3, -1]}, {"window": (3, None)}),
    ({"softcap": 0}, {"softcap": None}),
    ({"softcap": 30}, {"softcap": 30.0}),
    ({"scale": 1}, {"scale": 1.0}),
    ({"dropout_p": 0}, {}),
])  # fmt: skip
def test_equal_meanings_are_equal_values(one, other):
    assert AttentionSpec(**one) == AttentionSpec(**other)
    assert hash(AttentionSpec(**one)) == hash(AttentionSpec(**other))
    assert repr(AttentionSpec(**one)) == repr(AttentionSpec(**other))


def test_zero_and_negative_scales_are_scales():
    assert AttentionSpec(scale=0).scale == 0.0
    assert AttentionSpec(scale=-2).scale == -2.0


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_seeds_of_64_bits(seed):
    assert AttentionSpec(dropout_p=0.5, dropout_seed=seed).dropout_seed == seed


def test_a_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionSpec().causal = True


def test_header_sizes():
    header = TensorHeader("bfloat16", (2, 3, 4))
    assert (header.elements, header.nbytes) == (24, 48)
    assert TensorHeader("float64", ()).nbytes == 8
    assert TensorHeader("bool", (5, 0)).nbytes == 0

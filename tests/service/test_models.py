"""Options: each rule, by its name, in one reply; and that all tables of names agree."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from flashwire import wire
from flashwire_kernels.errors import Violation
from flashwire_service.front import checks, models, schemas
from flashwire_service.front.message import Message


def violations(model: type[BaseModel], values: dict[str, Any], schema: wire.Schema) -> list[str]:
    wrong: list[Violation] = []
    parsed = models.parse(model, values, schema, wrong)
    assert (parsed is None) == bool(wrong)
    return [str(violation) for violation in wrong]


def attention(**values: Any) -> list[str]:
    return violations(models.AttentionOptions, values, wire.ATTENTION)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scale": True}, "scale: must be a number, got true"),
        ({"scale": "1"}, "scale: must be a number, got '1'"),
        ({"scale": float("nan")}, "scale: must be finite, got nan"),
        ({"scale": float("-inf")}, "scale: must be finite, got -inf"),
        ({"scale": 10**400}, "scale: must be a number, got 1000000000"),
        ({"causal": 1}, "causal: must be true or false, got 1"),
        ({"causal": None}, "causal: must be true or false, got null"),
        ({"causal_align": "Top_left"}, "causal_align: must be 'bottom_right' or 'top_left'"),
        ({"window": [1]}, "window: must have 2 items, got a list"),
        ({"window": [1, 2, 3]}, "window: must have 2 items, got a list"),
        ({"window": 3}, "window: must be a list, got 3"),
        ({"window": [True, 0]}, "window: must be an integer, got true"),
        ({"window": [1.0, 0]}, "window: must be an integer, got 1.0"),
        ({"window": [0, -2]}, "window: must be at least -1, got -2"),
        ({"window": [0, 2**60]}, "window: must be at most 9007199254740992"),
        ({"softcap": -0.5}, "softcap: must be at least 0"),
        ({"dropout": 0.1}, "dropout: must be an object, got 0.1"),
        ({"dropout": {}}, "dropout.p: is missing"),
        ({"dropout": {"p": 1.0}}, "dropout.p: must be below 1"),
        ({"dropout": {"p": float("nan")}}, "dropout.p: must be finite"),
        ({"dropout": {"p": 0, "seed": 2**64}}, "dropout.seed: must be in [0, 2**64)"),
        ({"dropout": {"p": 0, "seed": -1}}, "dropout.seed: must be in [0, 2**64)"),
        ({"dropout": {"p": 0, "seed": "0x1"}}, "dropout.seed: must be an integer, got '0x1'"),
        ({"dropout": {"p": 0, "sead": 1}}, "dropout.sead: is not known; did you mean 'seed'?"),
        ({"layout": ""}, "layout: must be 'bhld' or 'blhd', got ''"),
        ({"precision": "TF32"}, "precision: must be 'ieee' or 'tf32'"),
        ({"backend": "gpu"}, "backend: must be 'auto', 'reference', 'cpu' or 'triton'"),
        ({"version": 2}, "version: must be 1, got 2"),
        ({"version": True}, "version: must be an integer, got true"),
        ({"return_lse": 0}, "return_lse: must be true or false, got 0"),
        ({"cusal": True}, "cusal: is not known; did you mean 'causal'?"),
        ({"msk": True}, "msk: is not known; did you mean 'mask'?"),
    ],
)
def test_each_rule(given: dict[str, Any], said: str) -> None:
    (found,) = attention(**given)
    assert found.startswith(said)


def test_values_are_cut_short() -> None:
    (found,) = attention(layout="x" * 10_000)
    assert len(found) < 150


def test_good_options() -> None:
    assert attention() == []
    assert attention(scale=0, causal=True, window=[-1, None], softcap=0) == []
    assert attention(layout=None, dropout=None, precision="tf32", backend="reference") == []
    assert attention(dropout={"p": 0.5, "seed": "18446744073709551615"}) == []
    assert attention(scale=2**70) == []


def test_all_violations_come_at_once() -> None:
    found = attention(scale="a", causal=2, window=[-3, -4], nothing=1)
    assert [text.partition(":")[0] for text in found] == [
        "scale", "causal", "window", "window", "nothing",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "model", "prefix"),
    [
        (wire.ATTENTION, models.AttentionOptions, ""),
        (wire.CHECK, models.AttentionOptions, "request."),
        (wire.CHECK, models.CheckOptions, ""),
        (wire.PLAN, models.PlanOptions, ""),
    ],
)
def test_the_wire_and_the_models_know_the_same_options(
    schema: wire.Schema, model: type[BaseModel], prefix: str
) -> None:
    known = schema.options or frozenset()
    names = {n.removeprefix(prefix) for n in known if n.startswith(prefix)}
    names = {n for n in names if "." not in n}
    groups = schema.groups if prefix == "" else frozenset()
    assert names | groups == set(model.model_fields)


def test_the_wire_and_the_models_know_the_same_options_of_backward() -> None:
    ours = set(models.BackwardOptions.model_fields) | set(models.ResidualOptions.model_fields)
    assert wire.BACKWARD.options == ours


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        (wire.ATTENTION, schemas.AttentionRequest),
        (wire.BACKWARD, schemas.BackwardRequest),
        (wire.PLAN, schemas.PlanRequest),
    ],
)
def test_the_documentation_shows_every_name_of_the_wire(
    schema: wire.Schema, shown: type[BaseModel]
) -> None:
    assert set(shown.model_fields) == schema.tensors | (schema.options or frozenset())


def test_options_of_a_job_leave_defaults_out() -> None:
    refs = {name: wire.TensorRef("float32", (2, 2), ((0, 16),)) for name in "qkv"}
    given = {"version": 1, "causal": True, "scale": None, "layout": "bhld", "window": [None, 3]}
    checked = checks.attention(Message(given, refs, b"", 0))
    assert checked.options == {"causal": True, "layout": "bhld", "window": [None, 3]}
    assert checked.problem.spec.window == (None, 3)

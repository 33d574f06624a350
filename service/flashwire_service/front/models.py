"""The options of each route, described: what a request is checked against.

They check the options of a message in either encoding. How JSON writes the tensors beside them
stands in schemas.py, for the documentation: tensors are read by json_codec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from flashwire import wire
from flashwire_kernels.errors import Violation
from flashwire_service.front.message import quoted

_MAX_EXACT = 2**53  # the largest integer range that every JSON reader keeps exact


def _decimal(value: object) -> object:
    """JSON readers lose uint64 above 2**53, so a seed may be written as a decimal string."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,20}", value):
        return int(value)
    return value


def _uint64(value: int) -> int:
    if not 0 <= value < 2**64:
        raise ValueError(f"must be in [0, 2**64), got {value}")
    return value


def _known_version(value: int) -> int:
    if value != 1:
        raise ValueError(f"must be 1, got {quoted(value)}")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


Backend = Annotated[
    Literal["auto", "reference", "cpu", "triton"],
    Field(
        description="What computes. auto takes the fastest that supports the request; a named one "
        "that cannot is refused with every reason."
    ),
]


class Dropout(_Strict):
    """Dropout on the softmax weights; kept ones are scaled by 1/(1-p)."""

    p: float = Field(ge=0, lt=1, description="Probability that an entry is dropped.")
    seed: Annotated[int, BeforeValidator(_decimal), AfterValidator(_uint64)] | None = Field(
        None,
        description="uint64, an integer or a decimal string; drawn and returned when absent.",
        json_schema_extra={"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    )


class Options(_Strict):
    """What attention means: the options that forward and backward share."""

    version: Annotated[int, AfterValidator(_known_version)] = Field(
        1, description="Version of the message."
    )
    scale: float | None = Field(
        None, description="Factor on q.k, any finite number; null is head_dim**-0.5."
    )
    causal: bool = Field(False, description="Key j is visible to query i only when j <= pos(i).")
    causal_align: Literal["bottom_right", "top_left"] = Field(
        "bottom_right",
        description="pos(i) = i + (Lk - Lq) for bottom_right, i for top_left. Moves window and "
        "ALiBi too.",
    )
    window: list[Annotated[int, Field(ge=-1, le=_MAX_EXACT)] | None] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="[left, right]: keys from pos(i)-left to pos(i)+right are visible, both ends "
        "included; null or -1 is an open end.",
    )
    softcap: float | None = Field(
        None, ge=0, description="s becomes softcap * tanh(s / softcap); 0 or null is off."
    )
    dropout: Dropout | None = None
    layout: Literal["bhld", "blhd"] | None = Field(
        None, description="Order of axes, bhld when absent. Packed tensors have none."
    )
    precision: Literal["ieee", "tf32"] = Field(
        "ieee", description="tf32 permits float32 products of reduced precision."
    )
    backend: Backend = "auto"


class AttentionOptions(Options):
    """Options of POST /attention."""

    return_lse: bool = Field(False, description="Return lse, the log of each row's sum of exp(s).")
    save_for_backward: bool = Field(
        False, description="Keep what backward needs on the server; the reply has its `residual`."
    )


class BackwardOptions(Options):
    """Options of POST /attention/backward without a residual."""

    bias_grad: bool = Field(False, description="Return dbias, in bias's shape and dtype.")
    sinks_grad: bool = Field(False, description="Return dsinks.")


class ResidualOptions(_Strict):
    """Options of POST /attention/backward by residual: the forward's own options are kept."""

    version: Annotated[int, AfterValidator(_known_version)] = 1
    residual: str = Field(description="The id that a forward with save_for_backward returned.")
    release: bool = Field(False, description="Free the residual afterwards.")
    bias_grad: bool = Field(False, description="Return dbias, in bias's shape and dtype.")
    sinks_grad: bool = Field(False, description="Return dsinks.")
    backend: Backend | None = Field(None, description="The forward's own when absent.")


class Mine(_Strict):
    """A caller's own results, tensors alone."""


class CheckOptions(_Strict):
    """Options of POST /attention/check."""

    version: Annotated[int, AfterValidator(_known_version)] = 1
    request: AttentionOptions
    mine: Mine | None = None
    backends: list[Backend] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="The two to compare; by default the fastest and reference.",
    )


class PlanOptions(AttentionOptions):
    """Options of POST /attention/plan."""

    sram_elements: int = Field(
        131072, ge=1, le=_MAX_EXACT, description="Elements of fast memory to plan tiles for."
    )


_PREAMBLE = "Input should be "
_RULES = {
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "model_type": "must be an object",
    "finite_number": "must be finite",
    "literal_error": "must be {expected}",
    "too_short": "must have {min_length} items",
    "too_long": "must have {max_length} items",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}
Model = TypeVar("Model", bound=BaseModel)


def parse(
    model: type[Model],
    values: Mapping[str, Any],
    schema: wire.Schema,
    wrong: list[Violation],
    prefix: str = "",
) -> Model | None:
    """The options as a model, or None with every violation added to `wrong`."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            path = [str(part) for part in error["loc"] if isinstance(part, str)]
            field = prefix + ".".join(_places(path))
            wrong.append(Violation(field, _message(error, path, schema)))
        return None


def _places(path: list[str]) -> list[str]:
    """A location without the branches of unions that pydantic adds ("function-before[...]")."""
    return [part for part in path if "[" not in part and "(" not in part] or path[:1]


def _message(error: Any, path: list[str], schema: wire.Schema) -> str:
    match error["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not known" + wire.nearest(path[-1], _siblings(schema, path))
        case "value_error":
            return str(error["ctx"]["error"])
    context = error.get("ctx", {})
    rule = _RULES.get(error["type"])
    said = rule.format(**context) if rule else "must be " + error["msg"].removeprefix(_PREAMBLE)
    return f"{said}, got {quoted(error['input'])}"


def _siblings(schema: wire.Schema, path: list[str]) -> list[str]:
    """Names that may stand where an unknown one stood."""
    if path[:-1] == ["dropout"] or path[1:-1] == ["dropout"]:
        return list(Dropout.model_fields)
    return schema.siblings("".join(f"{part}." for part in path[:-1]))

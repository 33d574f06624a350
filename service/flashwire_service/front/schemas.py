"""What the documentation says of bodies: the tensors and replies as JSON writes them, examples.

Nothing here checks a request; models.py, json_codec.py and checks.py do.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema
from pydantic.json_schema import models_json_schema

from flashwire_service.errors import ROWS
from flashwire_service.front import models, problems

_LISTS = {"type": "array", "items": {}}
_DTYPES = ["bool", "float16", "bfloat16", "float32", "float64", "int32", "int64"]
_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 8}
_TENSOR_OBJECT = {
    "type": "object",
    "properties": {"dtype": {"enum": _DTYPES}, "shape": _SHAPE, "data": {}},
    "required": ["dtype", "data"],
    "additionalProperties": False,
}
_HEADER_OBJECT = {
    "type": "object",
    "properties": {"dtype": {"enum": _DTYPES}, "shape": _SHAPE},
    "required": ["dtype", "shape"],
    "additionalProperties": False,
}
Tensor = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [_LISTS, _TENSOR_OBJECT],
            "description": "Nested lists (all booleans: bool; offsets: int64; else float32), or "
            'dtype and data, with a shape where it has no elements. "NaN", "Infinity" and '
            '"-Infinity" are strings.',
        }
    ),
]
Header = Annotated[Any, WithJsonSchema(_HEADER_OBJECT)]
_OFFSETS = {"type": "array", "items": {"type": "integer"}}
Offsets = Annotated[Any, WithJsonSchema({"anyOf": [_OFFSETS, _TENSOR_OBJECT]})]


class _Inputs(BaseModel):
    q: Tensor = Field(description="(B,Hq,Lq,D); or rank 2 or 3; packed (Tq,Hq,D)")
    k: Tensor = Field(description="(B,Hkv,Lk,D); Hkv divides Hq")
    v: Tensor = Field(description="(B,Hkv,Lk,Dv)")


class _Shaping(BaseModel):
    mask: Tensor = Field(None, description="bool, True = visible; broadcasts to (B,Hq,Lq,Lk)")
    bias: Tensor = Field(None, description="floats added to scores; broadcasts to (B,Hq,Lq,Lk)")
    alibi_slopes: Tensor = Field(None, description="(Hq,) or (B,Hq)")
    sinks: Tensor = Field(None, description="(Hq,) logits that take part in each row's sum")
    cu_seqlens_q: Offsets = Field(None, description="B+1 offsets of packed sequences in q")
    cu_seqlens_k: Offsets = Field(None, description="B+1 offsets of packed sequences in k, v")


class AttentionRequest(models.AttentionOptions, _Shaping, _Inputs):  # q, k, v are shown first
    """Options and tensors of POST /attention."""


class BackwardRequest(models.BackwardOptions, _Shaping):
    """Either `residual` and dout, or q, k, v, dout and the forward's options."""

    dout: Tensor = Field(description="Gradient of out, in its shape and dtype")
    dlse: Tensor = Field(None, description="Gradient of lse")
    residual: str | None = Field(None, description="Id of a saved forward; no inputs then")
    release: bool = Field(False, description="Free the residual afterwards")
    q: Tensor = None
    k: Tensor = None
    v: Tensor = None
    out: Tensor = Field(None, description="The forward's out: with lse, or recomputed")
    lse: Tensor = Field(None, description="The forward's lse")


class MineRequest(models.Mine):
    """A caller's own results."""

    out: Tensor = None
    lse: Tensor = None
    dq: Tensor = None
    dk: Tensor = None
    dv: Tensor = None


class CheckRequest(models.CheckOptions):
    """A request of /attention to compute twice and compare."""

    request: AttentionRequest
    mine: MineRequest | None = None
    dout: Tensor = Field(None, description="Gradient of out: gradients are compared too")


class PlanRequest(models.PlanOptions):
    """Headers of tensors, without data, and options."""

    q: Header
    k: Header = Field(None, description="q's when absent")
    v: Header = Field(None, description="q's when absent")
    mask: Header = None
    bias: Header = None
    alibi_slopes: Header = None
    sinks: Header = None
    cu_seqlens_q: list[int] | None = None
    cu_seqlens_k: list[int] | None = None


class SkippedReply(BaseModel):
    """A faster backend that did not run."""

    backend: str
    reasons: list[str]


class MetaReply(BaseModel):
    """What computed the reply, and how long it took."""

    backend: str
    device: str
    skipped: list[SkippedReply]
    precision: str
    seed: str | None = Field(None, description="Of the dropout; a string, being uint64")
    timings_ms: dict[str, float] = Field(description="queue, compute, total")


class AttentionReply(BaseModel):
    """Results of a forward."""

    out: Tensor
    lse: Tensor = None
    residual: str = ""
    meta: MetaReply


class BackwardReply(BaseModel):
    """Gradients, each in the shape and dtype of what it is the gradient of."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor = None
    dsinks: Tensor = None
    meta: MetaReply


class ProblemReply(BaseModel):
    """RFC 9457. `code` is a stable word; `error` repeats `detail`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    error: str
    field: str = Field("", description="The option or tensor it is about")
    reasons: list[str] = Field([], description="Every reason, where there can be several")
    request_id: str


EXAMPLES: dict[str, dict[str, Any]] = {
    "attention": {
        "q": [[1, 0], [0, 1]],
        "k": [[1, 0], [0, 1]],
        "v": [[1, 2], [3, 4]],
        "causal": True,
        "return_lse": True,
    },
    "backward": {
        "q": [[1, 0], [0, 1]],
        "k": [[1, 0], [0, 1]],
        "v": [[1, 2], [3, 4]],
        "causal": True,
        "dout": [[1, 1], [1, 1]],
    },
    "check": {
        "request": {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]]},
        "dout": [[1, 1]],
    },
    "plan": {"q": {"shape": [1, 1, 16384, 128], "dtype": "float16"}, "causal": True},
}
_REQUESTS: dict[str, type[BaseModel]] = {
    "attention": AttentionRequest,
    "backward": BackwardRequest,
    "check": CheckRequest,
    "plan": PlanRequest,
}
_TIMEOUT = {
    "name": "Flashwire-Timeout-Ms",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 10**9},
    "description": "How long to wait for queue and compute, then 504; at most the server's limit.",
}
_REPLIES: dict[str, type[BaseModel]] = {"attention": AttentionReply, "backward": BackwardReply}


def components() -> dict[str, Any]:
    """The schemas that `operation` and `responses` refer to."""
    shown: list[type[BaseModel]] = [*_REQUESTS.values(), *_REPLIES.values(), ProblemReply]
    _, definitions = models_json_schema(
        [(model, "validation") for model in shown], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def operation(route: str) -> dict[str, Any]:
    """What OpenAPI says of a route's request: its body and its header."""
    body = {
        "required": True,
        "content": {
            "application/json": {
                "schema": _ref(_REQUESTS[route]),
                "example": EXAMPLES[route],
            },
            "application/msgpack": {
                "schema": {"type": "string", "format": "binary"},
            },
        },
    }
    return {"requestBody": body, "parameters": [_TIMEOUT]}


def responses(route: str | None, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of a route: its reply, and problems of these statuses."""
    table: dict[int | str, dict[str, Any]] = {}
    if route is not None:
        schema = _ref(_REPLIES[route]) if route in _REPLIES else {"type": "object"}
        table[200] = {
            "description": "The result, in the request's encoding or the one that Accept names.",
            "content": {
                "application/json": {"schema": schema},
                "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
            },
        }
    for status in statuses:
        titles = dict.fromkeys(row.title for row in ROWS.values() if row.status == status)
        table[status] = {
            "description": ", or: ".join(titles),
            "content": {problems.MEDIA_TYPE: {"schema": _ref(ProblemReply)}},
        }
    return table


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}

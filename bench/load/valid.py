"""Requests whose answers are known, each the child of its seed, and the judge of the replies.

The judge makes the request of a seed anew and compares what came back with the float64 reference,
within the contract's error budget. Every seed has data of its own: a reply to another request is
wrong.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from flashwire import operations
from flashwire.core import Operation, Response
from flashwire.errors import UnexpectedReply
from flashwire_kernels import api
from flashwire_kernels.check import check
from flashwire_kernels.plan import plan
from flashwire_kernels.testing import Call, Case, make
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import resolve
from load.connection import JSON, MSGPACK, Reply, Request

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def case_of(seed: int, longest: int = 80) -> Case:
    """Any attention that is small: packed or not, with some of the options."""
    r = random.Random(seed)
    packed = r.random() < 0.2
    rank = 4 if packed else r.choice((2, 3, 4, 4))
    heads_kv = 1 if rank == 2 else r.randint(1, 3)
    lens = tuple(r.randint(0, longest // 4) for _ in range(r.randint(1, 4)))
    return Case(
        seed=seed,
        batch=r.randint(1, 2) if rank == 4 else 1,
        heads_kv=heads_kv,
        heads_q=heads_kv if rank == 2 else heads_kv * r.randint(1, 2),
        len_q=r.choice((1, r.randint(0, longest))),
        len_k=r.randint(0, longest),
        lens_q=lens if packed else None,
        lens_k=tuple(n + r.randint(0, 9) for n in lens) if packed else None,
        padding=r.randint(0, 2) if packed else 0,
        dim=r.randint(1, 64),
        dim_v=r.choice((None, r.randint(1, 64))),
        dtype=r.choice(_DTYPES),
        layout="blhd" if not packed and rank > 2 and r.random() < 0.3 else None,
        rank=rank,
        scale=r.choice((None, None, 0.3, -0.2)),
        causal=r.random() < 0.5,
        causal_align=r.choice(("bottom_right", "top_left")),
        window=r.choice((None, None, (r.randint(0, 30), r.choice((None, 3))))),
        softcap=r.choice((None, None, 5.0)),
        dropout=r.choice((0.0, 0.0, 0.3)),
        alibi=r.choice((None, None, "h")),
        sinks=r.random() < 0.3,
        mask=r.choice((None, None, "bhqk", "k")),
        bias=r.choice((None, None, "bhqk", "11qk")),
        dlse=r.random() < 0.5,
        poison=r.random() < 0.2,
    )


# What is asked


def build(kind: str, seed: int, residual: str | None = None) -> Request:
    """The request of a kind (a key of KINDS) and seed. `residual` is for "by residual"."""
    if kind == "large":
        return _posted(_large(seed))
    if kind == "plan":
        return _posted(_planned(seed))
    call = _call(kind, seed)
    if kind == "by residual":
        return _posted(_by_residual(call, residual or ""))
    if kind.startswith("json"):
        return _as_json(call, backward=kind == "json backward")
    return _posted(_OPERATIONS[kind](call))


def _call(kind: str, seed: int) -> Call:
    """Numbers take more bytes as text, and a body in JSON may have fewer."""
    return make(case_of(seed, 16) if kind.startswith("json") else case_of(seed))


def _posted(operation: Operation[Any]) -> Request:
    body = b"".join(operation.body)
    return Request(path=operation.path, headers={"content-type": MSGPACK}, body=body)


def _options(call: Call) -> dict[str, Any]:
    """As flashwire's client takes them, tensors but q, k and v included."""
    spec = call.spec
    given = {
        "scale": spec.scale,
        "causal": spec.causal,
        "causal_align": spec.causal_align,
        "window": spec.window,
        "softcap": spec.softcap,
        "dropout": spec.dropout_p or None,
        "seed": spec.dropout_seed if spec.dropout_p else None,
        "layout": spec.layout,
        **{name: t for name, t in call.tensors.items() if name not in "qkv"},
    }
    return {name: value for name, value in given.items() if value is not None}


def _qkv(call: Call) -> tuple[torch.Tensor, ...]:
    return tuple(call.tensors[name] for name in "qkv")


def _asked_grads(call: Call) -> dict[str, Any]:
    return {f"{name}_grad": True for name in ("bias", "sinks") if name in call.tensors}


def _forward(call: Call) -> Operation[Any]:
    return operations.attention(*_qkv(call), return_lse=True, **_options(call))


def _saved(call: Call) -> Operation[Any]:
    return operations.attention(
        *_qkv(call), return_lse=True, save_for_backward=True, **_options(call)
    )


def _backward(call: Call) -> Operation[Any]:
    """Half of them with the forward's results, half without."""
    given: dict[str, Any] = _asked_grads(call) | _options(call)
    if call.dlse is None:
        inputs: dict[str, Any] = dict(call.tensors)
        found = api.forward(**inputs, spec=call.spec)
        given |= {"out": found.out, "lse": found.lse}
    q, k, v = _qkv(call)
    return operations.gradients(q, k, v, call.dout, dlse=call.dlse, **given)


def _by_residual(call: Call, residual: str) -> Operation[Any]:
    return operations.backward(residual, call.dout, dlse=call.dlse, **_asked_grads(call))


def _checked(call: Call) -> Operation[Any]:
    return operations.check(*_qkv(call), dout=call.dout, **_options(call))


def _large(seed: int) -> Operation[Any]:
    """With a single key, out is v."""
    one = np.ones((1, 1, 1, 1), np.float32)
    return operations.attention(one, one, _large_value(seed))


def _large_value(seed: int) -> Any:
    size = random.Random(seed).randint(20_000, 800_000)
    return np.random.default_rng(seed).random((1, 1, 1, size), np.float32)


def _plan_shapes(seed: int) -> tuple[tuple[int, ...], tuple[int, ...], AttentionSpec]:
    r = random.Random(seed)
    heads, dim = r.randint(1, 16), r.randint(1, 256)
    window = r.choice((None, (r.randint(0, 99), 0)))
    q, k = ((1, heads, r.randint(1, 9999), dim) for _ in range(2))
    return q, k, AttentionSpec(causal=r.random() < 0.5, window=window)


def _planned(seed: int) -> Operation[Any]:
    q, k, spec = _plan_shapes(seed)
    return operations.plan(q, k, dtype="float32", causal=spec.causal, window=spec.window)


_OPERATIONS: Mapping[str, Callable[[Call], Operation[Any]]] = {
    "forward": _forward,
    "saved": _saved,
    "backward": _backward,
    "check": _checked,
}
KINDS = (*_OPERATIONS, "by residual", "json forward", "json backward", "plan", "large")


def _as_json(call: Call, *, backward: bool) -> Request:
    values = _options(call) | {name: call.tensors[name] for name in "qkv"}
    if "dropout" in values:
        values["dropout"] = {"p": values["dropout"], "seed": str(values.pop("seed"))}
    if backward:
        values |= {"dout": call.dout, "dlse": call.dlse} | _asked_grads(call)
    else:
        values["return_lse"] = True
    body = {name: _to_json(v) for name, v in values.items()}
    path = "/attention/backward" if backward else "/attention"
    return Request(path=path, headers={"content-type": JSON}, body=json.dumps(body).encode())


def _to_json(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "data": _finite(value.tolist())}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# What has come back


def judge(kind: str, seed: int, reply: Reply) -> str | None:
    """What is wrong with a reply of status 200 to `build(kind, seed)`, or None."""
    try:
        if kind == "large":
            out = _read(_large(seed), reply).out
            return None if np.array_equal(out, _large_value(seed)) else "out is not v"
        if kind == "plan":
            return _judge_plan(seed, reply)
        call = _call(kind, seed)
        if kind == "check":
            report = _read(_checked(call), reply)
            return None if report.passed else f"the service finds itself wrong: {report}"
        gradients = kind in ("backward", "by residual", "json backward")
        return _compared(call, _tensors(call, reply, gradients), gradients)
    except (UnexpectedReply, KeyError, ValueError) as e:
        return f"the reply cannot be read: {type(e).__name__}: {e}"


def _read(operation: Operation[Any], reply: Reply) -> Any:
    body = np.frombuffer(reply.body, np.uint8).copy()
    return operation.read(Response(reply.status, reply.headers, body))


def _tensors(call: Call, reply: Reply, gradients: bool) -> dict[str, torch.Tensor]:
    if reply.headers["content-type"] == JSON:
        found = {n: v for n, v in json.loads(reply.body).items() if n not in ("meta", "residual")}
        return {name: _from_json(value) for name, value in found.items()}
    result = _read(_backward(call) if gradients else _forward(call), reply)
    names = ("dq", "dk", "dv", "dbias", "dsinks") if gradients else ("out", "lse")
    found = {name: getattr(result, name) for name in names}
    return {name: t for name, t in found.items() if t is not None}


def _from_json(value: Any) -> torch.Tensor:
    if isinstance(value, list):
        return torch.tensor(_numbers(value), dtype=torch.float32)
    dtype = getattr(torch, value["dtype"])
    wide = torch.tensor(_numbers(value["data"]), dtype=torch.float64)
    return wide.to(dtype).reshape(value["shape"])


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _compared(call: Call, mine: dict[str, torch.Tensor], gradients: bool) -> str | None:
    expected = {"out", "lse"}
    if gradients:
        extra = {f"d{name}" for name in ("bias", "sinks") if name in call.tensors}
        expected = {"dq", "dk", "dv"} | extra
    if mine.keys() != expected:
        return f"the reply holds {sorted(mine)}, not {sorted(expected)}"
    given: dict[str, Any] = dict(call.tensors)
    if gradients:
        given |= {"dout": call.dout, "dlse": call.dlse}
    report = check(**given, mine=mine, spec=call.spec)
    wrong = [f"{name}: {c}" for name, c in report.tensors.items() if not c.passed]
    return "; ".join(wrong) or None


def _judge_plan(seed: int, reply: Reply) -> str | None:
    q, k, spec = _plan_shapes(seed)
    headers = {"q": q, "k": k, "v": k}
    problem = resolve(spec, {name: TensorHeader("float32", s) for name, s in headers.items()})
    got = _read(_planned(seed), reply)
    counted = plan(problem)
    for name in ("flops_fwd", "flops_bwd", "bytes_min", "bytes_flash"):
        if getattr(got, name) != getattr(counted, name):
            return f"{name} is {getattr(got, name)}, not {getattr(counted, name)}"
    return None

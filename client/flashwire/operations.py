"""What can be asked of a server: arguments to an Operation, and its reply to a result.

These are the methods of Client and AsyncClient, docstrings included.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal, TypeVar, Unpack
from urllib.parse import quote

import msgpack

from flashwire import tensors, wire
from flashwire.core import Operation, Response, read_message
from flashwire.errors import Invalid, UnexpectedReply
from flashwire.options import (
    AttentionOptions,
    Options,
    PlanOptions,
    TensorOptions,
    refuse_unknown,
)
from flashwire.results import CheckReport, Gradients, Plan, Result, TensorCheck, Worst
from flashwire.tensors import Array, Home, Payload

T = TypeVar("T")
_MINE = ("out", "lse", "dq", "dk", "dv")
_SHAPING = tuple(TensorOptions.__annotations__)
_ROUNDED = ("q", "k", "v", "out", "dout")  # what the client's `dtype` applies to


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    save_for_backward: bool = False,
    timeout: float | None = None,
    **options: Unpack[AttentionOptions],
) -> Operation[Result]:
    """Exact attention of q (B, Hq, Lq, D), k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv): a Result.

    Arrays are NumPy or torch, also mixed; results are what q is, on its device. Rank 2 and 3 are
    accepted, and come back; packed sequences are (T, H, D) with cu_seqlens_q and cu_seqlens_k.

    return_lse          return the log of each row's sum of exp(s) too
    save_for_backward   keep on the server what `backward` needs, for a while
    timeout             seconds for queue and compute, retries included; default: the client's
    options             those of flashwire.options.AttentionOptions
    """
    refuse_unknown("attention", options, AttentionOptions.__annotations__)
    values, arrays = _forward({"q": q, "k": k, "v": v}, options)
    values |= _canonical({"return_lse": return_lse, "save_for_backward": save_for_backward})
    home = tensors.home_of(q)
    return _post("/attention", values, arrays, lambda r: _read_result(r, home), timeout)


def backward(
    saved: Result | str,
    dout: Array,
    *,
    dlse: Array | None = None,
    bias_grad: bool = False,
    sinks_grad: bool = False,
    release: bool = False,
    backend: str | None = None,
    timeout: float | None = None,
) -> Operation[Gradients]:
    """Gradients of an attention that the server has saved, given those of its out (and lse).

    saved        the Result of `attention(..., save_for_backward=True)`, or its residual
    dout, dlse   gradients of a scalar by out and by lse, in their shapes
    bias_grad, sinks_grad   return dbias, dsinks too
    release      free the residual afterwards; it is kept by default
    backend      what computes; the forward's own by default

    Raises Gone when the server has the residual no longer: `gradients` needs none.
    """
    values = _canonical(
        {
            "residual": residual_id(saved),
            "release": release,
            "backend": backend,
            "bias_grad": bias_grad,
            "sinks_grad": sinks_grad,
        }
    )
    arrays = _pack({"dout": dout, "dlse": dlse})
    home = tensors.home_of(dout)
    return _post(
        "/attention/backward", values, arrays, lambda r: _read_gradients(r, home), timeout,
        gone="lost" if release else "raise",
    )  # fmt: skip


def gradients(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    dlse: Array | None = None,
    bias_grad: bool = False,
    sinks_grad: bool = False,
    timeout: float | None = None,
    **options: Unpack[AttentionOptions],
) -> Operation[Gradients]:
    """Gradients with nothing kept on the server: give what `attention` was given.

    With dropout, `seed` must be the forward's (Result.meta["seed"]). out and lse, both or neither,
    spare the server computing them again. The rest is as for `backward` and `attention`.
    """
    refuse_unknown("gradients", options, AttentionOptions.__annotations__)
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    values, arrays = _forward(given, options)
    values |= _canonical({"bias_grad": bias_grad, "sinks_grad": sinks_grad})
    home = tensors.home_of(q)
    return _post("/attention/backward", values, arrays, lambda r: _read_gradients(r, home), timeout)


def check(
    q: Array,
    k: Array,
    v: Array,
    *,
    backends: Sequence[str] | None = None,
    mine: Result | Gradients | Mapping[str, Array] | None = None,
    dout: Array | None = None,
    timeout: float | None = None,
    **options: Unpack[AttentionOptions],
) -> Operation[CheckReport]:
    """Compare two backends, or results of your own with the reference: a CheckReport.

    backends   the two to compare; by default the fastest and "reference"
    mine       a Result, Gradients, or out, lse, dq, dk, dv by name
    dout       compare gradients as well, for this gradient of out
    """
    refuse_unknown("check", options, AttentionOptions.__annotations__)
    values, request = _forward({"q": q, "k": k, "v": v}, options)
    arrays = {f"request.{name}": payload for name, payload in request.items()}
    arrays |= {f"mine.{name}": payload for name, payload in _pack(_own(mine)).items()}
    arrays |= _pack({"dout": dout}, options.get("dtype"))
    values = _canonical({"backends": backends}) | {"request": values}
    return _post("/attention/check", values, arrays, _read_check, timeout)


def plan(
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    v_shape: Sequence[int] | None = None,
    *,
    dtype: object,
    sram_elements: int | None = None,
    timeout: float | None = None,
    **options: Unpack[PlanOptions],
) -> Operation[Plan]:
    """What an attention of these shapes would cost, without computing it: a Plan.

    k_shape is q's by default, and v_shape is k's.

    options         those of flashwire.options.PlanOptions
    sram_elements   elements of fast memory to count traffic for
    """
    refuse_unknown("plan", options, PlanOptions.__annotations__)
    rest: dict[str, Any] = dict(options)
    name = tensors.dtype_name(dtype)
    headers = {"q": _header("q", q_shape, name)}
    shapes = {"k": k_shape, "v": k_shape if v_shape is None else v_shape}
    shapes |= {n: rest.pop(f"{n}_shape", None) for n in _SHAPING if n not in wire.OFFSETS}
    for tensor, shape in shapes.items():
        if shape is not None:
            headers[tensor] = _header(tensor, shape, "bool" if tensor == "mask" else name)
    _refuse_packed_layout(rest)
    offsets = {n: _integers(n, rest.pop(n)) for n in wire.OFFSETS if rest.get(n) is not None}
    values = _canonical(_with_dropout(rest) | {"sram_elements": sram_elements}) | offsets
    layout = wire.lay_out(values, headers, payload=False)
    return Operation(
        "POST", "/attention/plan", _read_plan, tuple(layout.buffers({})), layout.size, timeout
    )


def release(saved: Result | str, *, timeout: float | None = None) -> Operation[None]:
    """Free what the server has saved. No error when it is gone already."""
    path = f"/attention/residual/{quote(residual_id(saved), safe='')}"
    return Operation("DELETE", path, lambda _: None, timeout=timeout, gone="done")


def info(*, timeout: float | None = None) -> Operation[dict[str, Any]]:
    """What the server is: device, dtypes, limits, versions, backends."""
    return Operation("GET", "/info", _read_values, timeout=timeout)


def ready(*, timeout: float | None = None) -> Operation[None]:
    """No error when a worker is ready to compute."""
    return Operation("GET", "/readyz", lambda _: None, timeout=timeout, retry=False)


def checked_options(options: Options) -> dict[str, Any]:
    """Options of an attention, canonical: those at their defaults are left out, and dropout is
    {p, seed}. Raises Invalid for a value that no message can carry.
    """
    return _canonical(_with_dropout(dict(options)))


def residual_id(saved: Result | str) -> str:
    """The id of a residual. Raises Invalid for a result that has none."""
    identifier = saved.residual if isinstance(saved, Result) else saved
    if not isinstance(identifier, str) or not identifier:
        raise Invalid("there is none: call attention with save_for_backward=True", field="residual")
    return identifier


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return wire.canonical(values)
    except wire.WireError as exc:
        raise Invalid(exc.detail, field=exc.field) from None


def _refuse_packed_layout(options: Mapping[str, Any]) -> None:
    """In the server's words: a layout that is the default does not travel, so it cannot say it."""
    packed = any(options.get(name) is not None for name in wire.OFFSETS)
    if packed and options.get("layout") is not None:
        raise Invalid("packed tensors are (T, H, D); layout must be absent", field="layout")


def _with_dropout(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("seed") is not None and options.get("dropout") is None:
        raise Invalid("is that of dropout, which is not given", field="seed")
    dropout = {"p": options.pop("dropout", 0.0), "seed": options.pop("seed", None)}
    return options | {"dropout": dropout}


def _forward(
    given: Mapping[str, Array | None], options: AttentionOptions
) -> tuple[dict[str, Any], dict[str, Payload]]:
    """Canonical options and packed tensors of an attention."""
    rest: dict[str, Any] = dict(options)
    _refuse_packed_layout(rest)
    dtype = rest.pop("dtype", None)
    shaping = {name: rest.pop(name, None) for name in _SHAPING}
    return _canonical(_with_dropout(rest)), _pack({**given, **shaping}, dtype)


def _pack(arrays: Mapping[str, Array | None], dtype: object = None) -> dict[str, Payload]:
    rounded = None if dtype is None else tensors.dtype_name(dtype)
    return {
        name: tensors.pack(name, value, rounded if name in _ROUNDED else None)
        for name, value in arrays.items()
        if value is not None
    }


def _own(mine: Result | Gradients | Mapping[str, Array] | None) -> Mapping[str, Array | None]:
    """A caller's own results, by the names that /attention/check knows."""
    if isinstance(mine, Result):
        return {"out": mine.out, "lse": mine.lse}
    if isinstance(mine, Gradients):
        return {"dq": mine.dq, "dk": mine.dk, "dv": mine.dv}
    for name in mine or ():
        if name not in _MINE:
            raise Invalid(f"{name!r} cannot be checked{wire.nearest(name, _MINE)}", field="mine")
    return mine or {}


def _header(name: str, shape: Sequence[int], dtype: str) -> wire.Header:
    return wire.Header(dtype, tuple(_integers(f"{name}_shape", shape)))


def _integers(name: str, values: Any) -> list[int]:
    items: list[int] = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(type(n) is int for n in items):
        raise Invalid("must hold integers only", field=name)
    return items


def _post(
    path: str,
    values: Mapping[str, Any],
    arrays: Mapping[str, Payload],
    read: Callable[[Response], T],
    timeout: float | None,
    gone: Literal["raise", "lost"] = "raise",
) -> Operation[T]:
    headers = tuple((name, payload.header) for name, payload in arrays.items())
    layout = _laid_out(msgpack.packb(values), headers)
    buffers = layout.buffers({name: payload.data for name, payload in arrays.items()})
    return Operation("POST", path, read, tuple(buffers), layout.size, timeout, gone=gone)


@functools.lru_cache(maxsize=256)
def _laid_out(options: bytes, headers: tuple[tuple[str, wire.Header], ...]) -> wire.Layout:
    """wire.lay_out of packed options. Callers ask for the same shapes again and again."""
    return wire.lay_out(msgpack.unpackb(options), dict(headers))


@contextmanager
def _reading(what: str, reply: Response) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        problem = f"this is no {what}: {type(exc).__name__} {exc}"
        raise UnexpectedReply(problem, reply.status) from exc


def _read_result(reply: Response, home: Home) -> Result:
    message = read_message(reply)
    arrays = _unpack(message, reply, home)
    with _reading("attention's result", reply):
        return Result(
            arrays["out"], arrays.get("lse"), message.options.get("residual"),
            message.options.get("meta", {}),
        )  # fmt: skip


def _read_gradients(reply: Response, home: Home) -> Gradients:
    message = read_message(reply)
    arrays = _unpack(message, reply, home)
    with _reading("gradients", reply):
        return Gradients(
            arrays["dq"], arrays["dk"], arrays["dv"], arrays.get("dbias"), arrays.get("dsinks"),
            message.options.get("meta", {}),
        )  # fmt: skip


def _unpack(message: wire.Message, reply: Response, home: Home) -> dict[str, Array]:
    return {n: tensors.unpack(ref, reply.body, home) for n, ref in message.tensors.items()}


def _read_values(reply: Response) -> dict[str, Any]:
    """A reply without tensors, as msgpack or JSON."""
    if not reply.headers.get("content-type", "").startswith("application/json"):
        return read_message(reply).options
    with _reading("JSON", reply):
        values: dict[str, Any] = json.loads(reply.body.tobytes())
    return values


def _read_check(reply: Response) -> CheckReport:
    values = _read_values(reply)
    with _reading("check's report", reply):
        compared = {name: _tensor_check(entry) for name, entry in values["tensors"].items()}
        return CheckReport(values["pass"], compared, values.get("meta", {}))


def _tensor_check(entry: Mapping[str, Any]) -> TensorCheck:
    worst = entry.get("worst")
    if worst is not None:
        worst = Worst(tuple(worst["index"]), float(worst["got"]), float(worst["want"]))
    return TensorCheck(
        passed=entry["pass"],
        max_abs=float(entry["max_abs"]),
        rel=float(entry["rel"]),
        budget=float(entry["budget"]),
        worst=worst,
    )


def _read_plan(reply: Response) -> Plan:
    values = _read_values(reply)
    with _reading("plan", reply):
        return Plan(**{f.name: values[f.name] for f in fields(Plan)})

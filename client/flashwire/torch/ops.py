"""The operators flashwire::attention and flashwire::attention_backward.

    attention            (tensors, options) -> (out, lse, ticket)
    attention_backward   (dout, dlse, ticket, out, lse, tensors, options, needed) -> gradients

Registered with torch, so that torch.compile puts them into its graphs as they are, and knows the
shapes of their results without a server. `needed` says for which of q, k, v, bias and sinks there
is to be a gradient; those come in that order. lse is empty unless `return_lse`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any, NamedTuple, NoReturn

import torch

from flashwire.client import Client, client_of
from flashwire.errors import (
    ConnectionLost,
    FlashwireWarning,
    Gone,
    NotFound,
    SecondDerivative,
)
from flashwire.torch import kept

Maybe = torch.Tensor | None
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


class Tensors(NamedTuple):
    """Inputs of an attention. `seed` is a uint64 in the bits of an int64, of shape ()."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Maybe = None
    bias: Maybe = None
    alibi_slopes: Maybe = None
    sinks: Maybe = None
    cu_seqlens_q: Maybe = None
    cu_seqlens_k: Maybe = None
    seed: Maybe = None


class Options(NamedTuple):
    """Everything else.

    client       a name, for client_of
    window       open ends are -1
    keep         a gradient is needed
    residual     the server keeps what it is computed from; else out and lse are kept here
    """

    client: str
    scale: float | None = None
    causal: bool = False
    causal_align: str = "bottom_right"
    window: list[int] | None = None
    softcap: float | None = None
    dropout: float = 0.0
    layout: str | None = None
    precision: str = "ieee"
    backend: str | None = None
    return_lse: bool = False
    keep: bool = False
    residual: bool = True


_TENSORS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Tensors._fields)
_OPTIONS = (
    "str client, float? scale, bool causal, str causal_align, SymInt[]? window, float? softcap, "
    "float dropout, str? layout, str precision, str? backend, bool return_lse, bool keep, "
    "bool residual"
)
_ATTENTION = "flashwire::attention"
_BACKWARD = "flashwire::attention_backward"
torch.library.define(_ATTENTION, f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    _BACKWARD,
    f"(Tensor dout, Tensor? dlse, Tensor ticket, Tensor? out, Tensor? lse, {_TENSORS}, {_OPTIONS}, "
    "bool[] needed) -> Tensor[]",
)
_COUNT = len(Tensors._fields)
_warned: weakref.WeakSet[Client] = weakref.WeakSet()
_lock = threading.Lock()  # of _warned


def attention(tensors: Tensors, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the operator; lse is empty unless options.return_lse."""
    out, lse, _ = torch.ops.flashwire.attention(*tensors, *options)
    return out, lse


@torch.library.impl(_ATTENTION, "CompositeExplicitAutograd")
def _attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors, options = Tensors(*args[:_COUNT]), Options(*args[_COUNT:])
    client = client_of(options.client)
    saves = options.keep and options.residual
    result = client.attention(
        **_arguments(tensors, options), return_lse=_has_lse(options), save_for_backward=saves
    )
    lse = _empty_lse(tensors.q) if result.lse is None else result.lse
    if not options.keep:
        return result.out, lse, kept.blank()
    return result.out, lse, kept.issue(client, result.residual, result.meta["backend"])


@torch.library.register_fake(_ATTENTION)  # type: ignore[untyped-decorator]
def _fake_attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors, options = Tensors(*args[:_COUNT]), Options(*args[_COUNT:])
    rows = tensors.q.shape[:-1]
    lse = _empty_lse(tensors.q)
    if _has_lse(options):
        if options.layout == "blhd" and len(rows) > 1:
            rows = torch.Size((*rows[:-2], rows[-1], rows[-2]))
        lse = lse.new_empty(rows)
    out = tensors.q.new_empty((*tensors.q.shape[:-1], tensors.v.shape[-1]))
    return out, lse, torch.empty(1, dtype=torch.uint8, device="cpu")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    tensors, ctx.options = Tensors(*inputs[:_COUNT]), Options(*inputs[_COUNT:])
    out, lse, ticket = output
    shared = (out, lse) if _has_lse(ctx.options) else (None, None)
    ctx.save_for_backward(ticket, *shared, *tensors)
    ctx.like_out = out.shape, out.dtype, out.device


def _differentiate(ctx: Any, dout: Maybe, dlse: Maybe, _: Maybe) -> tuple[Maybe, ...]:
    ticket, out, lse, *rest = ctx.saved_tensors
    by_name = dict(zip(Tensors._fields, ctx.needs_input_grad, strict=False))
    needed = [by_name[name] for name in DIFFERENTIABLE]
    if not _has_lse(ctx.options):
        dlse = None  # of no elements
    if dout is None:
        shape, dtype, device = ctx.like_out
        dout = torch.zeros(shape, dtype=dtype, device=device)
    found = iter(
        torch.ops.flashwire.attention_backward(
            dout, dlse, ticket, out, lse, *rest, *ctx.options, needed
        )
    )
    grads = (
        next(found) if name in DIFFERENTIABLE and by_name[name] else None
        for name in Tensors._fields
    )
    return (*grads, *(None,) * len(Options._fields))


torch.library.register_autograd(_ATTENTION, _differentiate, setup_context=_keep)


@torch.library.impl(_BACKWARD, "CompositeExplicitAutograd")
def _attention_backward(
    dout: torch.Tensor, dlse: Maybe, ticket: torch.Tensor, out: Maybe, lse: Maybe, *args: Any
) -> list[torch.Tensor]:
    tensors, needed = Tensors(*args[:_COUNT]), args[-1]
    options = Options(*args[_COUNT:-1])
    wanted = dict(zip(DIFFERENTIABLE, needed, strict=True))
    asked: dict[str, Any] = {f"{name}_grad": wanted[name] for name in ("bias", "sinks")}
    asked["dlse"] = dlse
    origin = kept.origin(ticket)
    if origin is None:  # a copy of a ticket
        client = client_of(options.client)
    else:  # whatever computes the gradients must be what computed the forward
        client, backend = origin
        options = options._replace(backend=backend)
    residual = kept.take(ticket)
    found = None
    if residual is not None:
        try:
            found = client.backward(residual, dout, release=True, **asked)
            _warned.discard(client)
        except (Gone, NotFound, ConnectionLost):
            pass  # it expired, the server restarted, or its reply was lost: send everything
        except BaseException:
            kept.put_back(ticket, client, residual)
            raise
    if found is None:
        found = client.gradients(
            **_arguments(tensors, options), dout=dout, out=out, lse=lse, **asked
        )
        if residual is not None:
            _warn(client)
    return [getattr(found, f"d{name}") for name in DIFFERENTIABLE if wanted[name]]


@torch.library.register_fake(_BACKWARD)  # type: ignore[untyped-decorator]
def _fake_backward(
    dout: torch.Tensor, dlse: Maybe, ticket: torch.Tensor, out: Maybe, lse: Maybe, *args: Any
) -> list[torch.Tensor]:
    tensors = Tensors(*args[:_COUNT])
    inputs = (getattr(tensors, name) for name in DIFFERENTIABLE)
    return [x.new_empty(x.shape) for x, needs in zip(inputs, args[-1], strict=True) if needs]


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise SecondDerivative


torch.library.register_autograd(_BACKWARD, _refuse)


def _warn(client: Client) -> None:
    """Once for all that a client has lost, until a residual of it is found again."""
    with _lock:
        told = client in _warned
        _warned.add(client)
    if not told:
        warnings.warn(
            f"{client!r} no longer has what it kept for a backward: it restarted, or that expired. "
            "Gradients are the same, computed from tensors that travel again",
            FlashwireWarning,
            stacklevel=2,
        )


def _arguments(tensors: Tensors, options: Options) -> dict[str, Any]:
    """As Client.attention and Client.gradients take them."""
    given: dict[str, Any] = {n: t for n, t in tensors._asdict().items() if t is not None}
    if tensors.seed is not None:
        given["seed"] = int(tensors.seed) % 2**64
    for name in ("scale", "causal", "causal_align", "softcap", "dropout", "precision", "backend"):
        given[name] = getattr(options, name)
    if options.window is not None:
        given["window"] = tuple(None if end == -1 else end for end in options.window)
    if options.layout is not None:
        given["layout"] = options.layout
    return given


def _has_lse(options: Options) -> bool:
    """Whether lse travels: asked for by the caller, or to be kept here in a residual's place."""
    return options.return_lse or (options.keep and not options.residual)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(0, dtype=wide)

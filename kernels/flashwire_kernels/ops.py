"""The operators flashwire_kernels::attention and flashwire_kernels::attention_backward.

    attention            (tensors, options) -> (out, lse)
    attention_backward   (dout, dlse, out, lse, tensors, options, needed) -> gradients

api registered with torch, so that torch.compile puts it into its graphs as it is, and knows the
shapes of its results. `needed` says for which of q, k, v, bias and sinks there is to be a gradient;
those come in that order. Results are contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, cast

import torch

from flashwire_kernels import api
from flashwire_kernels.errors import SecondDerivative
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec, CausalAlign, Layout, Precision

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
    """Those of AttentionSpec and api.forward. Open ends of the window are -1."""

    scale: float | None
    causal: bool
    causal_align: CausalAlign
    window: list[int] | None
    softcap: float | None
    dropout: float
    layout: Layout | None
    precision: Precision
    backend: str


_TENSORS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Tensors._fields)
_OPTIONS = (
    "float? scale, bool causal, str causal_align, SymInt[]? window, float? softcap, float dropout, "
    "str? layout, str precision, str backend"
)
_ATTENTION = "flashwire_kernels::attention"
_BACKWARD = "flashwire_kernels::attention_backward"
torch.library.define(_ATTENTION, f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    _BACKWARD,
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}, bool[] needed)"
    " -> Tensor[]",
)
_COUNT = len(Tensors._fields)


def attention(tensors: Tensors, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the operator."""
    out, lse = torch.ops.flashwire_kernels.attention(*tensors, *options)
    return out, lse


@torch.library.impl(_ATTENTION, "CompositeExplicitAutograd")
def _attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = Tensors(*args[:_COUNT]), Options(*args[_COUNT:])
    found = api.forward(**_arguments(tensors, options))
    return found.out.contiguous(), found.lse.contiguous()


@torch.library.register_fake(_ATTENTION)  # type: ignore[untyped-decorator]
def _fake_attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = Tensors(*args[:_COUNT]), Options(*args[_COUNT:])
    q, v = tensors.q, tensors.v
    rows = q.shape[:-1]
    if options.layout == "blhd" and len(rows) > 1:
        rows = torch.Size((*rows[:-2], rows[-1], rows[-2]))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:_COUNT])
    ctx.options = inputs[_COUNT:]


def _differentiate(ctx: Any, dout: Maybe, dlse: Maybe) -> tuple[Maybe, ...]:
    out, lse, *tensors = ctx.saved_tensors
    by_name = dict(zip(Tensors._fields, ctx.needs_input_grad, strict=False))
    needed = [by_name[name] for name in DIFFERENTIABLE]
    if dout is None:
        dout = torch.zeros_like(out)
    found = iter(
        torch.ops.flashwire_kernels.attention_backward(
            dout, dlse, out, lse, *tensors, *ctx.options, needed
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
    dout: torch.Tensor, dlse: Maybe, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> list[torch.Tensor]:
    tensors, options, needed = Tensors(*args[:_COUNT]), Options(*args[_COUNT:-1]), args[-1]
    wanted = dict(zip(DIFFERENTIABLE, needed, strict=True))
    found = api.backward(
        dout,
        out=out,
        lse=lse,
        dlse=dlse,
        wanted=Wanted(bias=wanted["bias"], sinks=wanted["sinks"]),
        **_arguments(tensors, options),
    ).gradients
    return [getattr(found, f"d{n}").contiguous() for n in DIFFERENTIABLE if wanted[n]]


@torch.library.register_fake(_BACKWARD)  # type: ignore[untyped-decorator]
def _fake_backward(
    dout: torch.Tensor, dlse: Maybe, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> list[torch.Tensor]:
    tensors = Tensors(*args[:_COUNT])
    inputs = (getattr(tensors, name) for name in DIFFERENTIABLE)
    return [x.new_empty(x.shape) for x, needs in zip(inputs, args[-1], strict=True) if needs]


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise SecondDerivative


torch.library.register_autograd(_BACKWARD, _refuse)


def _arguments(tensors: Tensors, options: Options) -> dict[str, Any]:
    """As api takes them."""
    given = tensors._asdict()
    seed = given.pop("seed")
    spec = AttentionSpec(
        scale=options.scale,
        causal=options.causal,
        causal_align=options.causal_align,
        window=cast("tuple[int, int] | None", options.window and tuple(options.window)),
        softcap=options.softcap,
        dropout_p=options.dropout,
        dropout_seed=None if seed is None else int(seed) % 2**64,
        layout=options.layout,
        precision=options.precision,
    )
    return {**given, "spec": spec, "backend": options.backend}

"""flash_attention: attention that autograd can differentiate, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashwire_kernels import api
from flashwire_kernels.errors import InvalidAttention, SecondDerivative, Violation
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec, CausalAlign, Layout, Precision

Maybe = torch.Tensor | None


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: CausalAlign = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: torch.Tensor | Sequence[int] | None = None,
    cu_seqlens_k: torch.Tensor | Sequence[int] | None = None,
    layout: Layout | None = None,
    precision: Precision = "ieee",
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out, or (out, lse) with return_lse; shapes and options as in api.forward and AttentionSpec.

    Gradients flow to q, k, v, bias and sinks, from out and from lse. alibi_slopes has none, and is
    refused when it asks for one. Without a seed, dropout draws one from torch's default generator.

    Raises what api.forward raises, and SecondDerivative when a gradient is differentiated.
    """
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidAttention([Violation("alibi_slopes", "has no gradient; detach it")])
    if dropout and seed is None:
        seed = int(torch.randint(-(2**63), 2**63 - 1, ()).item()) % 2**64
    spec = AttentionSpec(
        scale=scale,
        causal=causal,
        causal_align=causal_align,
        window=window,
        softcap=softcap,
        dropout_p=dropout,
        dropout_seed=seed,
        layout=layout,
        precision=precision,
    )
    others = {
        "spec": spec,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "backend": backend,
    }
    out, lse = _Attention.apply(q, k, v, bias, sinks, others)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """(q, k, v, bias, sinks) -> (out, lse); what has no gradient travels in a dict."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: Maybe,
        sinks: Maybe,
        others: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        r = api.forward(q, k, v, bias=bias, sinks=sinks, **others)
        tensors = {n: o for n, o in others.items() if isinstance(o, torch.Tensor)}
        ctx.save_for_backward(q, k, v, bias, sinks, r.out, r.lse, *tensors.values())
        ctx.names = tuple(tensors)
        plain = {n: o for n, o in others.items() if n not in tensors}
        ctx.plain = plain | {"backend": r.backend}  # the same again, whatever "auto" would take
        ctx.set_materialize_grads(False)
        return r.out, r.lse

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> tuple[Any, ...]:
        dout, dlse = grads
        q, k, v, bias, sinks, out, lse, *tensors = ctx.saved_tensors
        others = ctx.plain | dict(zip(ctx.names, tensors, strict=True))
        needed = ctx.needs_input_grad
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = Wanted(bias=needed[3], sinks=needed[4])
        found = _Gradients.apply(  # type: ignore[no-untyped-call]
            dout, q, k, v, bias, sinks, out, lse, dlse, wanted, others
        )
        return (*(g if need else None for g, need in zip(found, needed, strict=False)), None)


class _Gradients(torch.autograd.Function):
    """The gradients as a node of the graph, so that differentiating them is refused by name."""

    @staticmethod
    def forward(
        ctx: Any,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: Maybe,
        sinks: Maybe,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: Maybe,
        wanted: Wanted,
        others: dict[str, Any],
    ) -> tuple[Maybe, ...]:
        r = api.backward(
            dout,
            q,
            k,
            v,
            out=out,
            lse=lse,
            dlse=dlse,
            wanted=wanted,
            bias=bias,
            sinks=sinks,
            **others,
        )
        g = r.gradients
        return g.dq, g.dk, g.dv, g.dbias, g.dsinks

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> tuple[Any, ...]:
        raise SecondDerivative

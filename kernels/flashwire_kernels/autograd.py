"""flash_attention: attention that autograd can differentiate, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashwire_kernels import ops
from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.types import AttentionSpec, CausalAlign, Layout, Precision


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
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Any:
    """out, or (out, lse) with return_lse; shapes and options as in api.forward and AttentionSpec.

    The twin of flashwire.torch.flash_attention, in this process. Gradients flow to q, k, v, bias
    and sinks, from out and from lse. alibi_slopes has none, and is refused when it asks for one.
    dtype rounds q, k and v. Without a seed, dropout draws one from torch's default generator.
    Under autocast, q, k, v and bias are cast as scaled_dot_product_attention has it: to autocast's
    dtype, unless they are float64. torch.compile takes the call into its graph.

    Raises what api.forward raises, and SecondDerivative when a gradient is differentiated.
    """
    tensors: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "cu_seqlens_q": _offsets(cu_seqlens_q),
        "cu_seqlens_k": _offsets(cu_seqlens_k),
    }
    if not torch.compiler.is_compiling():  # the operator's own words would name less
        _refuse_others(tensors)
        AttentionSpec(
            scale=scale,
            causal=causal,
            causal_align=causal_align,
            window=window,
            softcap=softcap,
            dropout_p=dropout,
            dropout_seed=0 if seed is None else seed,
            layout=layout,
            precision=precision,
        )
    tensors = _cast(tensors, dtype)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidAttention([Violation("alibi_slopes", "has no gradient; detach it")])
    if dropout:
        tensors["seed"] = _seed(seed)
    options = ops.Options(
        scale=scale,
        causal=causal,
        causal_align=causal_align,
        window=None if window is None else [-1 if end is None else end for end in window],
        softcap=softcap,
        dropout=dropout,
        layout=layout,
        precision=precision,
        backend=backend,
    )
    out, lse = ops.attention(ops.Tensors(**tensors), options)
    return (out, lse) if return_lse else out


def _offsets(offsets: torch.Tensor | Sequence[int] | None) -> torch.Tensor | None:
    if offsets is None or isinstance(offsets, torch.Tensor):
        return offsets
    return torch.tensor(list(offsets), dtype=None if len(offsets) else torch.int64)


def _refuse_others(tensors: Mapping[str, Any]) -> None:
    wrong = [
        Violation(name, f"must be a torch.Tensor, got {type(x).__name__}")
        for name, x in tensors.items()
        if not isinstance(x, torch.Tensor) and (x is not None or name in ("q", "k", "v"))
    ]
    if wrong:
        raise InvalidAttention(wrong)


def _cast(tensors: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """q, k and v in `dtype`; then what autocast does to them and attn_mask for torch's SDPA."""
    if dtype is not None:
        tensors = tensors | {name: tensors[name].to(dtype) for name in ("q", "k", "v")}
    device = tensors["q"].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    kind = torch.get_autocast_dtype(device)
    return tensors | {
        name: tensors[name].to(kind)
        for name in ("q", "k", "v", "bias")
        if tensors[name] is not None
        and tensors[name].is_floating_point()
        and tensors[name].dtype != torch.float64
    }


def _seed(seed: int | None) -> torch.Tensor:
    """A uint64 in the bits of an int64; drawn here when absent, so that torch.manual_seed rules,
    and a checkpoint computes the same again.
    """
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), device="cpu")
    return torch.full((), seed if seed < 2**63 else seed - 2**64, dtype=torch.int64, device="cpu")

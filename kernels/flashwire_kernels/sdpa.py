"""torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch

from flashwire_kernels.autograd import flash_attention
from flashwire_kernels.errors import InvalidAttention, Violation


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's function of that name, computed by this library.

    query (..., H, L, E), key (..., H, S, E) and value (..., H, S, Ev) of two dimensions or more;
    what is before the last two broadcasts, and with enable_gqa the heads of key and value divide
    query's. is_causal is aligned top-left. attn_mask is boolean (True takes part) or floating
    (added, with a gradient), not both with is_causal, and broadcasts to (..., H, L, S).

    Where it differs: a query that sees no key gives 0, on every backend; dropout has the pattern of
    flashwire, seeded from torch's default generator. Raises InvalidAttention for what does not fit,
    by name.
    """
    options: dict[str, Any] = {"scale": scale, "causal": is_causal, "dropout": dropout_p}
    if is_causal:
        if attn_mask is not None:
            raise InvalidAttention([Violation("attn_mask", "cannot be given with is_causal")])
        options["causal_align"] = "top_left"
    q, k, v = _broadcast(query, key, value, enable_gqa)
    shape = (*q.shape[:-1], v.shape[-1])
    if attn_mask is not None:
        kind = _kind(attn_mask)
        options[kind] = _fold_mask(attn_mask, (*q.shape[:-1], k.shape[-2]))
    out: torch.Tensor = flash_attention(*(_fold(x) for x in (q, k, v)), **options)
    return out.reshape(shape)


def _broadcast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With equal leading dimensions, but for the heads of GQA."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < (3 if gqa else 2):
            raise InvalidAttention([Violation(name, f"has {x.ndim} dimensions, too few")])
    one_head = q.ndim == k.ndim == v.ndim >= 3 and k.shape[-3] == v.shape[-3] == 1
    tail = 3 if gqa or one_head else 2  # heads of query may share one as it is
    leading = [x.shape[:-tail] for x in (q, k, v)]
    if leading[0] == leading[1] == leading[2]:
        return q, k, v
    try:
        common = torch.broadcast_shapes(*leading)  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        hint = "" if gqa else "; enable_gqa lets heads differ"
        raise InvalidAttention(
            [Violation("query", f"does not broadcast with key and value: {shapes}{hint}")]
        ) from None
    q, k, v = (x.expand(*common, *x.shape[-tail:]) for x in (q, k, v))
    return q, k, v


def _kind(attn_mask: torch.Tensor) -> str:
    if attn_mask.dtype == torch.bool:
        return "mask"
    if attn_mask.is_floating_point():
        return "bias"
    raise InvalidAttention(
        [Violation("attn_mask", f"must be boolean or floating point, got {attn_mask.dtype}")]
    )


def _fold(x: torch.Tensor) -> torch.Tensor:
    """(B, H, L, D) of any number of leading dimensions above two."""
    return x.flatten(0, -4) if x.ndim > 4 else x


def _fold_mask(mask: torch.Tensor, full: tuple[int, ...]) -> torch.Tensor:
    if len(full) <= 4:
        return mask
    return mask.expand(full).flatten(0, -4)

"""flash_attn_func and flash_attn_varlen_func of flash-attn 2."""

from __future__ import annotations

from typing import Any

import torch

from flashwire_kernels.autograd import flash_attention
from flashwire_kernels.errors import InvalidAttention, Violation


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attn's function of that name, computed by this library.

    q (B, Lq, H, D), k and v (B, Lk, Hkv, D), of which Hkv divides H. causal and window_size are
    aligned bottom-right; -1 is an open end. alibi_slopes are (H,) or (B, H). `deterministic` asks
    for what is always so here.

    With return_attn_probs: (out, softmax_lse (B, H, Lq), None). The third is where flash-attn puts
    dropout's pattern; probabilities are never materialised here, so with dropout_p it is refused.
    softmax_lse has a gradient, and is -inf for a query that sees no key, whose out is 0.

    Any float dtype, and v of any head dimension. Raises InvalidAttention for what does not fit, by
    name.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    _refuse_probabilities(return_attn_probs, dropout_p)
    found: Any = flash_attention(q, k, v, return_lse=return_attn_probs, layout="blhd", **options)
    return (*found, None) if return_attn_probs else found


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """`flash_attn_func` of packed sequences: q (Tq, H, D), k and v (Tk, Hkv, D).

    cu_seqlens_q and cu_seqlens_k are (B + 1,) offsets, int32 or int64. max_seqlen_q and
    max_seqlen_k must be no less than the longest sequences; how much more does not matter.
    softmax_lse is (H, Tq). Paged keys (block_table) are refused.
    """
    if block_table is not None:
        raise InvalidAttention(
            [Violation("block_table", "paged keys and values are not supported")]
        )
    _refuse_short("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    _refuse_short("max_seqlen_k", max_seqlen_k, cu_seqlens_k)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    _refuse_probabilities(return_attn_probs, dropout_p)
    found: Any = flash_attention(
        q, k, v, return_lse=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options,
    )  # fmt: skip
    if not return_attn_probs:
        return found
    out, lse = found
    return out, lse.mT, None


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    if not isinstance(deterministic, bool):
        raise InvalidAttention(
            [Violation("deterministic", f"must be true or false, got {deterministic!r}")]
        )
    return {
        "dropout": dropout_p,
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def _refuse_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p:
        text = "the pattern of dropout is not returned: ask without dropout_p, for out and lse"
        raise InvalidAttention([Violation("return_attn_probs", text)])


def _refuse_short(name: str, longest: int, offsets: torch.Tensor) -> None:
    """Not under torch.compile, to which values of tensors are unknown."""
    if torch.compiler.is_compiling() or offsets.numel() < 2:
        return
    found = int(offsets.diff().max())
    if longest < found:
        raise InvalidAttention(
            [Violation(name, f"must be at least {found}, as long as a sequence, got {longest}")]
        )

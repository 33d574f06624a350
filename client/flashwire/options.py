"""The options of an attention, as the client's methods take them.

Their meaning is docs/contract.md, "The operation".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from flashwire.tensors import Array
from flashwire.wire import nearest

Backend = Literal["auto", "reference", "cpu", "triton"]


class Options(TypedDict, total=False):
    """What shapes an attention, beside q, k and v. Every option may be left out."""

    scale: float | None  # factor on q.k; default D**-0.5; any finite number
    causal: bool  # key j is visible to query i only when j <= pos(i)
    causal_align: Literal["bottom_right", "top_left"]  # pos(i) = i + (Lk - Lq), or i
    window: tuple[int | None, int | None] | None  # (left, right) of pos(i), inclusive; None is open
    softcap: float | None  # s becomes softcap * tanh(s / softcap)
    dropout: float  # probability in [0, 1) that a weight is dropped
    seed: int | None  # of dropout, uint64; drawn by the server when absent, and in meta
    layout: Literal["bhld", "blhd"]  # order of axes; packed tensors have none
    precision: Literal["ieee", "tf32"]  # tf32 permits reduced float32 products
    backend: Backend | None  # what computes; None is the server's choice


class TensorOptions(TypedDict, total=False):
    """Tensors that shape an attention, NumPy or torch."""

    mask: Array | None  # boolean, True = visible; broadcasts to (B, Hq, Lq, Lk)
    bias: Array | None  # floating, added to the scores; broadcasts to (B, Hq, Lq, Lk)
    alibi_slopes: Array | None  # (Hq,) or (B, Hq)
    sinks: Array | None  # (Hq,), logits of keys without a value
    cu_seqlens_q: Array | list[int] | None  # (B+1,) offsets of packed sequences
    cu_seqlens_k: Array | list[int] | None


class AttentionOptions(Options, TensorOptions, total=False):
    """Every option of an attention whose values are at hand."""

    dtype: Any  # round q, k, v (and dout) to this dtype on their way: "bf16", np.float32, ...


class PlanOptions(Options, total=False):
    """Every option of an attention that is only planned: shapes stand in for tensors."""

    mask_shape: tuple[int, ...] | None
    bias_shape: tuple[int, ...] | None
    alibi_slopes_shape: tuple[int, ...] | None
    sinks_shape: tuple[int, ...] | None
    cu_seqlens_q: Array | list[int] | None
    cu_seqlens_k: Array | list[int] | None


def refuse_unknown(function: str, given: Iterable[str], known: Mapping[str, Any]) -> None:
    """What Python does for a parameter list, for options in a TypedDict. Raises TypeError."""
    for name in given:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}{nearest(name, known)}"
            )

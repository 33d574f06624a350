"""Exact attention, forward and backward, as a library.

    out = flash_attention(q, k, v, causal=True)          differentiable
    r = forward(q, k, v, spec=AttentionSpec(causal=True))     r.out, r.lse, r.backend, r.skipped
    out = scaled_dot_product_attention(q, k, v), flash_attn_func(q, k, v)      drop-in twins
    g = backward(dout, q, k, v, out=r.out, lse=r.lse, spec=...)     g.gradients.dq, .dk, .dv

Names are loaded when first used: importing this package, or its types, errors, validation, support
and plan, does not load torch.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashwire_kernels.api import backward, forward
    from flashwire_kernels.autograd import flash_attention
    from flashwire_kernels.errors import (
        AttentionError,
        InvalidAttention,
        NotEnoughMemory,
        SecondDerivative,
        UnsupportedBackend,
        Violation,
    )
    from flashwire_kernels.flash_attn import flash_attn_func, flash_attn_varlen_func
    from flashwire_kernels.sdpa import scaled_dot_product_attention
    from flashwire_kernels.tensors import Backward, Forward, Gradients, Skipped, Wanted
    from flashwire_kernels.types import AttentionSpec, TensorHeader
    from flashwire_kernels.validation import Problem

__all__ = [
    "AttentionError",
    "AttentionSpec",
    "Backward",
    "Forward",
    "Gradients",
    "InvalidAttention",
    "NotEnoughMemory",
    "Problem",
    "SecondDerivative",
    "Skipped",
    "TensorHeader",
    "UnsupportedBackend",
    "Violation",
    "Wanted",
    "backward",
    "flash_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "forward",
    "scaled_dot_product_attention",
]

_HOMES = MappingProxyType(
    {
        "api": ("backward", "forward"),
        "autograd": ("flash_attention",),
        "flash_attn": ("flash_attn_func", "flash_attn_varlen_func"),
        "sdpa": ("scaled_dot_product_attention",),
        "errors": (
            "AttentionError",
            "InvalidAttention",
            "NotEnoughMemory",
            "SecondDerivative",
            "UnsupportedBackend",
            "Violation",
        ),
        "tensors": ("Backward", "Forward", "Gradients", "Skipped", "Wanted"),
        "types": ("AttentionSpec", "TensorHeader"),
        "validation": ("Problem",),
    }
)
_HOME_OF = MappingProxyType({name: home for home, names in _HOMES.items() for name in names})


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

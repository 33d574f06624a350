"""Attention over the wire for torch: differentiable, traceable by torch.compile.

    from flashwire.torch import flash_attention, use
    out = flash_attention(q, k, v, client=client, causal=True)
    out.sum().backward()

`scaled_dot_product_attention`, `flash_attn_func` and `flash_attn_varlen_func` have the signatures
of torch's and flash-attn's own. `use(client)` names the client of all calls that name none.
"""

try:
    import torch as _torch
except ModuleNotFoundError as exc:
    if exc.name != "torch":
        raise
    hint = "flashwire.torch needs torch: pip install 'flashwire[torch]'"
    raise ImportError(hint, name="torch") from None

from flashwire.torch.attention import flash_attention, submit
from flashwire.torch.default import use
from flashwire.torch.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashwire.torch.sdpa import scaled_dot_product_attention

del _torch

__all__ = [
    "flash_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "scaled_dot_product_attention",
    "submit",
    "use",
]

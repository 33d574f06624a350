"""Sinks: logits that only enlarge the denominator. Folded in after the attention itself."""

from __future__ import annotations

import math

import torch

from flashwire_kernels.cpu.lse import union


def fold(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, Hq, Lq, Dv) and lse (B, Hq, Lq) with the sinks (Hq,) in them, by

    lse' = log(exp(lse) + exp(sink)),   out' = out * exp(lse - lse')
    """
    logits = _logits(sinks, lse.dtype)
    united = union(lse, logits)
    share = (lse - united).exp_().masked_fill_(united == -math.inf, 0)
    return out * share[..., None], united


def gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """dsinks (Hq,) in float64: -sum over rows of exp(sink - lse) * delta.

    lse and delta are (B, Hq, Lq); delta is sum(dout * out) - dlse, and 0 where lse is -inf.
    """
    share = (_logits(sinks, torch.float64) - lse).exp_().masked_fill_(lse == -math.inf, 0)
    return -(share * delta).sum((0, 2))


def _logits(sinks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    logits = sinks.to(dtype)
    return logits.masked_fill(logits == math.inf, math.nan)[:, None]

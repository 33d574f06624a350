"""The union of two log-sum-exps, with bits that do not depend on where a row stands among others.

torch.logaddexp rounds differently at the end of a tensor; torch.exp and torch.log do not.
"""

from __future__ import annotations

import math

import torch


def union(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)), -inf where both are, of tensors that broadcast."""
    base = torch.maximum(a, b).nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
    return (a - base).exp_().add_((b - base).exp_()).log_().add_(base)

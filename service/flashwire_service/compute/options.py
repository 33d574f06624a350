"""The options of a job -> what the kernels take."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec

Options = Mapping[str, Any]
OF_BACKWARD = ("dout", "dlse", "out", "lse")  # tensors that only a backward takes


def spec_of(options: Options) -> AttentionSpec:
    """The options of an attention. The front end has drawn the seed that a forward may lack."""
    dropout = options.get("dropout") or {}
    window = options.get("window")
    return AttentionSpec(
        scale=options.get("scale"),
        causal=options.get("causal", False),
        causal_align=options.get("causal_align", "bottom_right"),
        window=None if window is None else tuple(window),
        softcap=options.get("softcap"),
        dropout_p=dropout.get("p", 0.0),
        dropout_seed=dropout.get("seed"),
        layout=options.get("layout"),
        precision=options.get("precision", "ieee"),
    )


def backend_of(options: Options) -> str:
    """The backend that is asked for."""
    return options.get("backend") or "auto"


def wanted_of(options: Options, tensors: Container[str]) -> Wanted:
    """Gradients asked for beside dq, dk, dv. Raises InvalidAttention for one of what is absent."""
    asked = {name: bool(options.get(f"{name}_grad")) for name in ("bias", "sinks")}
    wrong = [
        Violation(f"{name}_grad", f"there is no {name} to differentiate")
        for name, wish in asked.items()
        if wish and name not in tensors
    ]
    if wrong:
        raise InvalidAttention(wrong)
    return Wanted(**asked)

"""A call as a user writes it, made into the tensors and options that the operator takes.

torch.compile traces this. What it cannot trace is for when it does not look, and says by name what
the operator would refuse in words of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flashwire.errors import Invalid
from flashwire.operations import checked_options
from flashwire.options import AttentionOptions, refuse_unknown
from flashwire.tensors import dtype_name, pack
from flashwire.torch.ops import DIFFERENTIABLE, Options, Tensors

_KNOWN = frozenset(AttentionOptions.__annotations__)
_OPTIONAL = tuple(name for name in Tensors._fields if name not in ("q", "k", "v", "seed"))
_KINDS: Mapping[str, tuple[str, type]] = MappingProxyType(
    {
        "scale": ("a number", float),
        "causal": ("true or false", bool),
        "causal_align": ("a string", str),
        "softcap": ("a number", float),
        "layout": ("a string", str),
        "precision": ("a string", str),
        "backend": ("a string", str),
        "dropout": ("a number", float),
        "seed": ("an integer", int),
    }
)


def read(
    client: str,
    qkv: tuple[Any, Any, Any],
    given: Mapping[str, Any],
    return_lse: bool,
    residual: bool,
) -> tuple[Tensors, Options]:
    """Raises TypeError for an unknown option, Invalid for a wrong one, by name."""
    if not _KNOWN.issuperset(given):
        refuse_unknown("flash_attention", given, AttentionOptions.__annotations__)
    rest = {name: value for name, value in given.items() if value is not None}
    tensors = {name: _own(name, x) for name, x in zip("qkv", qkv, strict=True)}
    tensors |= {name: _tensor(name, rest.pop(name)) for name in _OPTIONAL if name in rest}
    if "dtype" in rest:
        kind = getattr(torch, dtype_name(rest.pop("dtype")))
        tensors |= {name: tensors[name].to(kind) for name in "qkv"}
    tensors = _autocast(tensors)
    keep = _needs_gradient(tensors)
    if not torch.compiler.is_compiling():
        rest = _checked(rest)
    dropout, seed = rest.pop("dropout", 0.0), rest.pop("seed", None)
    if dropout:
        tensors["seed"] = _seed(seed)
    if "window" in rest:
        rest["window"] = [-1 if end is None else end for end in rest["window"]]
    options = Options(
        client, dropout=dropout, return_lse=return_lse, keep=keep, residual=residual, **rest
    )
    return Tensors(**tensors), options


def _own(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    got = f"{type(value).__module__}.{type(value).__qualname__}"
    raise Invalid(f"must be a torch.Tensor, got {got}: Client.attention takes NumPy", field=name)


def _tensor(name: str, value: Any) -> torch.Tensor:
    """An array of NumPy's, or a list of offsets, with its values as they would travel."""
    if isinstance(value, torch.Tensor):
        return value
    if torch.compiler.is_compiling():
        return torch.as_tensor(value)
    packed = pack(name, value)
    kind = getattr(torch, packed.header.dtype)
    if not packed.data.nbytes:
        return torch.empty(packed.header.shape, dtype=kind)
    return torch.frombuffer(bytearray(packed.data), dtype=kind).reshape(packed.header.shape)


def _autocast(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What autocast does to query, key, value and attn_mask of scaled_dot_product_attention."""
    device = tensors["q"].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    kind = torch.get_autocast_dtype(device)
    return tensors | {
        name: tensors[name].to(kind)
        for name in ("q", "k", "v", "bias")
        if name in tensors
        and tensors[name].is_floating_point()
        and tensors[name].dtype != torch.float64
        and tensors[name].device.type == device
    }


def _needs_gradient(tensors: Mapping[str, torch.Tensor]) -> bool:
    if not torch.is_grad_enabled():
        return False
    needing = [name for name, tensor in tensors.items() if tensor.requires_grad]
    for name in needing:
        if name not in DIFFERENTIABLE:
            raise Invalid("has no gradient here: detach it", field=name)
    return bool(needing)


def _seed(seed: int | None) -> torch.Tensor:
    """A uint64 in the bits of an int64; drawn here when absent, so that torch.manual_seed rules,
    and a checkpoint computes the same again.
    """
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), device="cpu")
    if not 0 <= seed < 2**64:
        raise Invalid(f"seed must be an integer in [0, 2**64), got {seed}", field="dropout")
    return torch.full((), seed if seed < 2**63 else seed - 2**64, dtype=torch.int64, device="cpu")


def _checked(rest: dict[str, Any]) -> dict[str, Any]:
    """Options in the types that the operator takes. Raises Invalid for what has another."""
    found = checked_options(rest)  # type: ignore[arg-type]
    dropout = found.pop("dropout", {"p": 0.0})
    found |= {"dropout": dropout["p"], "seed": dropout.get("seed")}
    for name, (kind, type_) in _KINDS.items():
        if found.get(name) is not None and type(found[name]) is not type_:
            raise Invalid(f"must be {kind}, got {type(found[name]).__name__}", field=name)
    for end in found.get("window", ()):
        if end is not None and type(end) is not int:
            raise Invalid(f"must hold integers or None, got {end!r}", field="window")
    return found

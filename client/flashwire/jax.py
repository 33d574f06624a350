"""Attention over the wire as a differentiable JAX function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Unpack, overload

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as exc:
    if exc.name not in ("jax", "jaxlib"):
        raise
    hint = "flashwire.jax needs jax: pip install 'flashwire[jax]'"
    raise ImportError(hint, name="jax") from None

import numpy as np

from flashwire.client import Client
from flashwire.errors import Invalid, SecondDerivative
from flashwire.options import AttentionOptions, refuse_unknown
from flashwire.tensors import dtype_name

_TENSORS = ("mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")
_CONSTANT = ("mask", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
_SymbolicZero = jax.custom_derivatives.SymbolicZero


@overload
def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    client: Client,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    client: Client,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    client: Client,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`Client.attention` with gradients for q, k, v, bias and sinks: out, or (out, lse).

    Works under jit, grad and vmap (one request for each element); lse is differentiable too. A
    JAX function is pure: nothing is kept on the server, backward sends q, k, v, out and lse, and
    dropout needs its seed. Gradients for mask, alibi_slopes and offsets are refused; second
    derivatives raise SecondDerivative. What the server refuses is a jax.errors.JaxRuntimeError
    that says why.
    """
    refuse_unknown("flash_attention", options, AttentionOptions.__annotations__)
    if not isinstance(client, Client):
        raise TypeError(f"client must be a flashwire.Client, got {type(client).__name__}")
    if options.get("dropout") and options.get("seed") is None:
        raise Invalid("must be given with dropout: a JAX function is pure", field="seed")
    rest: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if (dtype := rest.pop("dtype", None)) is not None:
        q, k, v = (jnp.asarray(x, dtype_name(dtype)) for x in (q, k, v))
    tensors = {"q": q, "k": k, "v": v}
    for name in _TENSORS:
        if name in rest:
            tensors[name] = jnp.asarray(rest.pop(name))
    plain = {name: tuple(x) if isinstance(x, list) else x for name, x in rest.items()}
    call = _Call(client, return_lse, tuple(plain.items()))
    out: tuple[jax.Array, ...] = _attention(call, tensors)
    return (out[0], out[1]) if return_lse else out[0]


@dataclass(frozen=True)
class _Call:
    """All of an attention but its tensors."""

    client: Client
    return_lse: bool
    options: tuple[tuple[str, Any], ...]

    def shapes(self, tensors: dict[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of out and lse."""
        q, v = tensors["q"], tensors["v"]
        rows = q.shape[:-1]
        if dict(self.options).get("layout") == "blhd" and len(rows) > 1:
            rows = (*rows[:-2], rows[-1], rows[-2])
        wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
        return out, jax.ShapeDtypeStruct(rows, wide)

    def forward(self, tensors: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        def ask(given: dict[str, Any]) -> tuple[Any, Any]:
            given = {name: np.asarray(x) for name, x in given.items()}
            result = self.client.attention(**given, return_lse=True, **dict(self.options))
            return result.out, result.lse

        out, lse = _on_the_host(ask, self.shapes(tensors), tensors)
        return out, lse

    def gradients(self, wanted: tuple[str, ...], saved: dict[str, Any]) -> dict[str, jax.Array]:
        """Of the tensors wanted. saved has those of the forward, out, lse, dout and maybe dlse."""
        asked: dict[str, Any] = {f"{name}_grad": name in wanted for name in ("bias", "sinks")}

        def ask(given: dict[str, Any]) -> dict[str, Any]:
            given = {name: np.asarray(x) for name, x in given.items()}
            found = self.client.gradients(**given, **asked, **dict(self.options))
            return {name: getattr(found, f"d{name}") for name in wanted}

        shapes = {n: jax.ShapeDtypeStruct(saved[n].shape, saved[n].dtype) for n in wanted}
        result: dict[str, jax.Array] = _on_the_host(ask, shapes, saved)
        return result


def _call_back(ask: Any, shapes: Any, given: dict[str, Any]) -> Any:
    return jax.pure_callback(ask, shapes, given, vmap_method="sequential")


def _refuse(*_: Any) -> NoReturn:
    raise SecondDerivative


# A first derivative never differentiates what is computed on the host: it has a rule of its own.
_on_the_host = jax.custom_jvp(_call_back, nondiff_argnums=(0, 1))
_on_the_host.defjvp(_refuse)


def _attend(call: _Call, tensors: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    out, lse = call.forward(tensors)
    return (out, lse) if call.return_lse else (out,)


def _forward(call: _Call, tensors: dict[str, Any]) -> tuple[tuple[jax.Array, ...], Any]:
    # A dict for its keys: only arrays may be kept, but how they are arranged may say anything.
    needing = {name: None for name, x in tensors.items() if x.perturbed}
    for name in _CONSTANT:
        if name in needing and jnp.issubdtype(tensors[name].value.dtype, jnp.floating):
            raise Invalid("has no gradient here: stop_gradient it", field=name)
    values = {name: x.value for name, x in tensors.items()}
    out, lse = call.forward(values)
    kept = {**values, "out": out, "lse": lse}
    return (out, lse) if call.return_lse else (out,), (kept, needing)


def _backward(call: _Call, residual: Any, cotangents: tuple[Any, ...]) -> tuple[dict[str, Any]]:
    kept, needing = residual
    names = [name for name in kept if name not in ("out", "lse")]
    douts = dict(zip(("dout", "dlse"), cotangents, strict=False))
    if isinstance(douts["dout"], _SymbolicZero):
        douts["dout"] = jnp.zeros_like(kept["out"])
    if isinstance(douts.get("dlse"), _SymbolicZero):
        del douts["dlse"]
    wanted = tuple(name for name in names if name in needing and name not in _CONSTANT)
    found = call.gradients(wanted, {**kept, **douts})
    return ({name: found.get(name) for name in names},)


_attention = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attention.defvjp(_forward, _backward, symbolic_zeros=True)

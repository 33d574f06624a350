"""Attention over the wire as a differentiable torch function.

The only module of the client that imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Unpack, overload

try:
    import torch
except ModuleNotFoundError as exc:
    if exc.name != "torch":
        raise
    hint = "flashwire.torch needs torch: pip install 'flashwire[torch]'"
    raise ImportError(hint, name="torch") from None

from flashwire.client import Client
from flashwire.errors import ConnectionLost, Gone, Invalid, NotFound, SecondDerivative
from flashwire.options import AttentionOptions, refuse_unknown
from flashwire.results import Gradients, Result
from flashwire.tensors import dtype_name

_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
_CONSTANT = ("mask", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`Client.attention` with gradients for q, k, v, bias and sinks: out, or (out, lse).

    lse is differentiable too. When a gradient is needed the server keeps the forward, and frees it
    at the first backward; a graph walked again, or one whose residual is gone, is computed from the
    tensors that the graph itself holds. Under no_grad nothing is kept anywhere. mask and offsets
    have no gradient; neither has alibi_slopes, and one that requires it is refused. Second
    derivatives raise SecondDerivative. torch.compile leaves this call as it is (a graph break).
    """
    refuse_unknown("flash_attention", options, AttentionOptions.__annotations__)
    if not isinstance(client, Client):
        raise TypeError(f"client must be a flashwire.Client, got {type(client).__name__}")
    run: Any = _flash_attention
    if "torch._dynamo" in sys.modules:  # loading it takes seconds, so not before others need it
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return run(q, k, v, client, return_lse, dict(options))  # type: ignore[no-any-return]


def _flash_attention(
    q: Any, k: Any, v: Any, client: Client, return_lse: bool, rest: dict[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            got = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            raise Invalid(
                f"must be a torch.Tensor, got {got}: Client.attention takes NumPy", field=name
            )
    dtype = rest.pop("dtype", None)
    if dtype is not None:
        kind = getattr(torch, dtype_name(dtype))
        q, k, v = q.to(kind), k.to(kind), v.to(kind)
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v}
    for name in (*_DIFFERENTIABLE[3:], *_CONSTANT):
        if isinstance(rest.get(name), torch.Tensor):
            tensors[name] = rest.pop(name)
    needing = [name for name, t in tensors.items() if t.requires_grad]
    if not torch.is_grad_enabled() or not needing:
        result: Any = client.attention(**tensors, return_lse=return_lse, **rest)
        return (result.out, result.lse) if return_lse else result.out
    for name in _CONSTANT:
        if name in needing:
            raise Invalid("has no gradient here: detach it", field=name)
    call = _Call(client, tuple(tensors), rest)
    out, lse = _Attention.apply(call, *tensors.values())  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


@dataclass
class _Call:
    """One attention in a graph: what `backward` needs beside tensors."""

    client: Client
    names: tuple[str, ...]  # of the tensors, in the order they are given to autograd
    options: dict[str, Any]
    residual: str | None = None

    def forward(self, tensors: dict[str, Any]) -> Result:
        result = self.client.attention(
            **tensors, return_lse=True, save_for_backward=True, **self.options
        )
        self.residual = result.residual
        for name in ("seed", "backend"):  # whatever computes the gradients must use the same
            if name in result.meta:
                self.options[name] = result.meta[name]
        return result

    def backward(
        self,
        tensors: dict[str, Any],
        out: torch.Tensor,
        lse: torch.Tensor,
        grads: tuple[torch.Tensor, torch.Tensor | None],
        wanted: dict[str, Any],
    ) -> Gradients:
        dout, dlse = grads
        residual, self.residual = self.residual, None
        if residual is not None:
            try:
                return self.client.backward(residual, dout, dlse=dlse, release=True, **wanted)
            except (Gone, NotFound, ConnectionLost):
                pass  # it expired, the server restarted, or its reply was lost: send everything
        return self.client.gradients(
            **tensors, dout=dout, dlse=dlse, out=out, lse=lse, **wanted, **self.options
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[Any, Any]:
        result = call.forward(dict(zip(call.names, tensors, strict=True)))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(result.out, result.lse, *tensors)
        return result.out, result.lse

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        out, lse, *saved = ctx.saved_tensors
        tensors = dict(zip(ctx.call.names, saved, strict=True))
        needed = dict(zip(ctx.call.names, ctx.needs_input_grad[1:], strict=True))
        wanted: dict[str, Any] = {
            f"{name}_grad": needed.get(name, False) for name in ("bias", "sinks")
        }
        if dout is None:
            dout = torch.zeros_like(out)

        def compute() -> tuple[torch.Tensor | None, ...]:
            found = ctx.call.backward(tensors, out, lse, (dout, dlse), wanted)
            return tuple(getattr(found, f"d{n}") if needed[n] else None for n in ctx.call.names)

        return (None, *_Once.apply(compute, dout, dlse, *saved))  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """Gradients as a function of everything they depend on, whose own gradient is refused."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], tuple[torch.Tensor | None, ...]], *_: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> NoReturn:
        raise SecondDerivative

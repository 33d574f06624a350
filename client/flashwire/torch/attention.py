"""flash_attention and submit: differentiable attention over the wire."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Literal, Unpack, overload

import torch

from flashwire.client import Client
from flashwire.options import AttentionOptions
from flashwire.torch import ops
from flashwire.torch.arguments import read
from flashwire.torch.default import resolve


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client | None = None,
    return_lse: Literal[False] = False,
    residual: bool = True,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client | None = None,
    return_lse: Literal[True],
    residual: bool = True,
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client | None = None,
    return_lse: bool,
    residual: bool = True,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client | None = None,
    return_lse: bool = False,
    residual: bool = True,
    **options: Unpack[AttentionOptions],
) -> Any:
    """`Client.attention` with gradients for q, k, v, bias and sinks: out, or (out, lse).

    client     the server's; that of `flashwire.torch.use` when absent
    residual   where a gradient is needed, the server keeps the forward, and frees it at the first
               backward or when the graph is dropped. A graph walked again, or one whose residual is
               gone (one FlashwireWarning), sends the tensors that it holds anyway. False keeps
               nothing on the server: the graph holds out and lse as well, and sends them all
    options    those of flashwire.options.AttentionOptions

    lse is differentiable too. Under no_grad nothing is kept anywhere. mask and offsets have no
    gradient; neither has alibi_slopes, and one that requires it is refused. Second derivatives
    raise SecondDerivative. Without a seed, dropout draws one from torch's default generator. Under
    autocast, q, k, v and bias are cast as scaled_dot_product_attention has it: to autocast's dtype,
    unless they are float64. torch.compile takes the call into its graph.
    """
    name = resolve(client).name
    tensors, values = read(name, (q, k, v), options, return_lse, residual)
    return _run(tensors, values)


def submit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client | None = None,
    return_lse: bool = False,
    residual: bool = True,
    **options: Unpack[AttentionOptions],
) -> Future[Any]:
    """`flash_attention` beside others, in a thread of Client.submit: a Future of what it returns.

    Grad mode, autocast and a drawn seed are those of the moment of this call. torch.compile has no
    graph for it.
    """
    chosen = resolve(client)
    tensors, values = read(chosen.name, (q, k, v), options, return_lse, residual)
    return chosen.submit(_run_with, torch.is_grad_enabled(), tensors, values)


def _run_with(grad: bool, tensors: ops.Tensors, options: ops.Options) -> Any:
    with torch.set_grad_enabled(grad):
        return _run(tensors, options)


def _run(tensors: ops.Tensors, options: ops.Options) -> Any:
    out, lse = ops.attention(tensors, options)
    return (out, lse) if options.return_lse else out

"""flash_attention over the wire: gradients, and what is kept where."""

from typing import Any

import numpy as np
import pytest
import torch

from flashwire import AsyncClient, Client, errors
from flashwire.torch import flash_attention


@pytest.fixture
def leaves() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = dict.fromkeys("qkv", (1, 2, 3, 4)) | {"bias": (1, 1, 3, 3), "sinks": (2,)}
    return {
        name: torch.randn(shape, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def reference(leaves: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any]:
    """By autograd in float64."""
    wide = {name: leaf.double() for name, leaf in leaves.items()}
    s = wide["q"] @ wide["k"].mT * wide["q"].shape[-1] ** -0.5
    s = s + wide["bias"]
    if options.get("causal"):
        s = s.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    s = torch.cat([s, wide["sinks"][:, None, None].expand(1, 2, 3, 1)], -1)
    lse = s.logsumexp(-1)
    return (s - lse[..., None]).exp()[..., :3] @ wide["v"], lse


@pytest.mark.parametrize("loss", ["out", "lse", "both"])
def test_gradients_are_those_of_autograd(
    client: Client, leaves: dict[str, torch.Tensor], loss: str
) -> None:
    """K31: a gradient flows through lse too."""

    def total(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        terms = {"out": out.sin().sum(), "lse": (lse * lse).sum()}
        return terms["out"] + terms["lse"] if loss == "both" else terms[loss]

    def gradients(out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        leaf_list = list(leaves.values())
        return torch.autograd.grad(total(out, lse), leaf_list, materialize_grads=True)

    found = gradients(*flash_attention(**leaves, client=client, causal=True, return_lse=True))
    wanted = gradients(*reference(leaves, causal=True))
    for name, got, want in zip(leaves, found, wanted, strict=True):
        assert got.dtype == leaves[name].dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)


def test_only_what_is_needed(server: Any, client: Client, leaves: dict[str, torch.Tensor]) -> None:
    for name in ("k", "bias"):
        leaves[name].requires_grad_(False)
    flash_attention(**leaves, client=client).sum().backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == ["q", "v", "sinks"]
    assert server.last.options.get("sinks_grad") is True
    assert "bias_grad" not in server.last.options
    assert "dlse" not in server.last.tensors


def test_nothing_is_kept_without_need(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    with torch.no_grad():
        out = flash_attention(**leaves, client=client)
    assert not out.requires_grad
    with torch.inference_mode():
        flash_attention(**leaves, client=client)
    constant = {name: leaf.detach() for name, leaf in leaves.items()}
    out, lse = flash_attention(**constant, client=client, return_lse=True)
    assert not lse.requires_grad
    assert server.residuals == {}


def test_the_residual_is_freed_by_the_first_backward(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    out = flash_attention(**leaves, client=client)
    assert len(server.residuals) == 1
    first = torch.autograd.grad(out.sum(), leaves["q"], retain_graph=True)
    assert server.residuals == {}
    second = torch.autograd.grad(out.sum(), leaves["q"])
    assert "residual" not in server.last.options
    assert {"out", "lse", "bias", "sinks"} <= set(server.last.tensors)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("how", ["gone", "not_found", "lost"])
def test_a_residual_that_is_gone_costs_an_upload(
    server: Any, client: Client, leaves: dict[str, torch.Tensor], how: str
) -> None:
    out = flash_attention(**leaves, client=client, causal=True)
    wanted = torch.autograd.grad(reference(leaves, causal=True)[0].sum(), list(leaves.values()))
    gone = server.problem(410, "gone", "expired")
    server.script = {
        "gone": [gone],
        "not_found": [server.problem(404, "not_found", "never seen")],
        "lost": ["drop", gone],
    }[how]
    found = torch.autograd.grad(out.sum(), list(leaves.values()))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert server.last.options == {
        "causal": True, "backend": "cpu", "bias_grad": True, "sinks_grad": True,
    }  # fmt: skip


def test_dropout_of_the_fallback_is_the_forwards(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    out = flash_attention(**leaves, client=client, dropout=0.25)
    server.residuals.clear()
    out.sum().backward()
    assert server.last.options["dropout"] == {"p": 0.25, "seed": 99}


def test_gradients_of_any_strides(client: Client, leaves: dict[str, torch.Tensor]) -> None:
    """K11."""
    q, k, v = (torch.arange(24.0).reshape(1, 2, 3, 4).requires_grad_() for _ in "qkv")
    g = torch.arange(24).reshape(1, 3, 2, 4).float().transpose(1, 2)
    found = []
    for grad in (g, g.contiguous()):
        out = flash_attention(q, k, v, client=client)
        found.append(torch.autograd.grad(out, (q, k, v), grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_refused_by_name(
    client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    out = flash_attention(**leaves, client=client)
    (grad,) = torch.autograd.grad(out.sin().sum(), leaves["q"], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(errors.SecondDerivative, match="second derivatives"):
        grad.sum().backward()


def test_dtype_has_a_gradient(client: Client, leaves: dict[str, torch.Tensor]) -> None:
    out = flash_attention(leaves["q"], leaves["k"], leaves["v"], client=client, dtype="bf16")
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert leaves["v"].grad is not None
    assert leaves["v"].grad.dtype == torch.float32


def test_options_of_every_kind(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    mask = np.array([True, True, False])
    out = flash_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        client=client,
        mask=mask,
        scale=2,
        bias=leaves["bias"],
    )
    server.residuals.clear()
    out.sum().backward()
    assert server.last.tensors["mask"].tolist() == mask.tolist()
    assert server.last.options["scale"] == 2.0


def test_what_has_no_gradient_is_refused(client: Client, leaves: dict[str, torch.Tensor]) -> None:
    q, k, v = (leaves[name] for name in "qkv")
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(errors.Invalid, match="alibi_slopes: has no gradient"):
        flash_attention(q, k, v, client=client, alibi_slopes=slopes)
    with torch.no_grad():
        flash_attention(q, k, v, client=client, alibi_slopes=slopes)
    with pytest.raises(TypeError, match="'causl'"):
        flash_attention(q, k, v, client=client, causl=True)
    with pytest.raises(TypeError, match=r"flashwire\.Client, got AsyncClient"):
        flash_attention(q, k, v, client=AsyncClient("http://host"))


def test_changed_inputs_are_noticed(client: Client, leaves: dict[str, torch.Tensor]) -> None:
    q = leaves["q"] * 1
    out = flash_attention(q, leaves["k"], leaves["v"], client=client)
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_other_arrays_are_refused_by_name(server: Any, client: Client, qkv: Any) -> None:
    q, k, v = qkv
    with pytest.raises(errors.Invalid, match=r"q: must be a torch\.Tensor, got numpy\.ndarray"):
        flash_attention(q, k, v, client=client)
    with pytest.raises(errors.Invalid, match=r"v: must be a torch\.Tensor, got builtins\.list"):
        flash_attention(*map(torch.from_numpy, (q, k)), v.tolist(), client=client, dtype="bf16")
    assert server.received == []


def test_compiled_models_run_it_as_it_is(
    client: Client, leaves: dict[str, torch.Tensor], recwarn: pytest.WarningsRecorder
) -> None:
    """A graph break, before and after which the model is compiled."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def model(**x: torch.Tensor) -> torch.Tensor:
        return flash_attention(**{**x, "q": x["q"] * 2}, client=client, causal=True).sin() + 1

    def gradients(run: Any) -> Any:
        return torch.autograd.grad(run(**leaves).sum(), list(leaves.values()))

    compiled = gradients(torch.compile(model, backend=keep))
    torch.testing.assert_close(compiled, gradients(model))
    assert len(graphs) == 2
    names = {node.name for graph in graphs for node in graph.graph.nodes}
    assert {"sin"} <= names
    with pytest.raises(Exception, match="disable"):
        torch.compile(model, backend="eager", fullgraph=True)(**leaves)
    torch.compiler.reset()

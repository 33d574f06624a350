"""flash_attention over the wire: gradients, and what is kept where."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashwire import AsyncClient, Client, errors
from flashwire.torch import flash_attention, use


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
    assert {"q", "k", "v", "dout", "bias", "sinks"} == set(server.last.tensors)
    torch.testing.assert_close(first, second)


def test_nothing_is_kept_on_the_server_where_that_is_wished(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    out = flash_attention(**leaves, client=client, residual=False)
    assert server.residuals == {}
    found = torch.autograd.grad(out.sum(), leaves["q"])
    assert {"out", "lse"} <= set(server.last.tensors)
    want = torch.autograd.grad(flash_attention(**leaves, client=client).sum(), leaves["q"])
    assert torch.equal(*found, *want)


def test_lse_travels_where_it_is_asked_for(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    first = flash_attention(**leaves, client=client)
    assert "return_lse" not in server.last.options
    assert first.requires_grad
    second = flash_attention(**leaves, client=client, return_lse=True)
    assert second[1].requires_grad
    assert server.last.options["return_lse"] is True


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
    with pytest.warns(errors.FlashwireWarning, match="no longer has what it kept"):
        found = torch.autograd.grad(out.sum(), list(leaves.values()))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert server.last.options == {
        "causal": True, "backend": "cpu", "bias_grad": True, "sinks_grad": True,
    }  # fmt: skip


def test_one_warning_for_all_that_one_event_has_taken(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    def lose(layers: int) -> int:
        outs = [flash_attention(**leaves, client=client) for _ in range(layers)]
        server.residuals.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]
        return len(said)

    assert lose(3) == 1
    assert lose(1) == 0
    flash_attention(**leaves, client=client).sum().backward()
    assert lose(2) == 1


def test_a_residual_that_could_not_be_used_is_still_there(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    out = flash_attention(**leaves, client=client)
    server.script = [server.problem(504, "deadline_exceeded", "late")]
    with pytest.raises(errors.DeadlineExceeded):
        torch.autograd.grad(out.sum(), leaves["q"], retain_graph=True)
    torch.autograd.grad(out.sum(), leaves["q"])
    assert "residual" in server.last.options
    assert server.residuals == {}


def test_dropout_of_the_fallback_is_the_forwards(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    torch.manual_seed(4)
    out = flash_attention(**leaves, client=client, dropout=0.25)
    drawn = server.last.options["dropout"]
    server.residuals.clear()
    with pytest.warns(errors.FlashwireWarning):
        out.sum().backward()
    assert server.last.options["dropout"] == drawn
    leaves = {name: leaf.detach() for name, leaf in leaves.items()}
    torch.manual_seed(4)
    flash_attention(**leaves, client=client, dropout=0.25)
    assert server.last.options["dropout"] == drawn
    flash_attention(**leaves, client=client, dropout=0.25, seed=2**64 - 1)
    assert server.last.options["dropout"] == {"p": 0.25, "seed": 2**64 - 1}


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
    with pytest.warns(errors.FlashwireWarning):
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


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("causal", 1, "causal: must be true or false, got int"),
        ("scale", "1", "scale: must be a number, got str"),
        ("window", (1.5, 0), r"window: must hold integers or None, got 1\.5"),
        ("window", 3, "window: must be a pair"),
        ("dropout", True, "dropout: must be a number, got bool"),
        ("seed", 5, "seed: is that of dropout, which is not given"),
    ],
)
def test_wrong_options_are_refused_by_name(
    client: Client, leaves: dict[str, torch.Tensor], option: str, value: Any, said: str
) -> None:
    with pytest.raises(errors.Invalid, match=said):
        flash_attention(**leaves, client=client, **{option: value})  # type: ignore[call-overload]


def test_a_seed_is_a_uint64(client: Client, leaves: dict[str, torch.Tensor]) -> None:
    for seed in (-1, 2**64):
        with pytest.raises(errors.Invalid, match="seed"):
            flash_attention(**leaves, client=client, dropout=0.5, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_is_that_of_sdpa(
    client: Client, leaves: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """q, k, v and the bias in autocast's dtype, but for float64; gradients in their own."""
    q, k, v, bias = (leaves[n].detach().to(dtype).requires_grad_() for n in ("q", "k", "v", "bias"))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
        ours = flash_attention(q, k, v, bias=bias, client=client)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    ours.sum().backward()
    assert q.grad is not None
    assert bias.grad is not None
    assert (q.grad.dtype, bias.grad.dtype) == (dtype, dtype)
    assert flash_attention(q, k, v, client=client).dtype == dtype


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(
    server: Any, client: Client, leaves: dict[str, torch.Tensor], reentrant: bool
) -> None:
    """The forward runs twice, with one pattern of dropout; only the second is kept."""

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        made = dict(zip(leaves, tensors, strict=True))
        return flash_attention(**made, client=client, dropout=0.25)  # type: ignore[no-any-return,call-overload]

    def gradients(run: Any) -> Any:
        torch.manual_seed(5)
        return torch.autograd.grad(run(*leaves.values()).sum(), list(leaves.values()))

    if reentrant:  # it refuses autograd.grad
        torch.manual_seed(5)
        checkpoint(layer, *leaves.values(), use_reentrant=True).sum().backward()
        found = [leaf.grad for leaf in leaves.values()]
    else:
        found = gradients(lambda *t: checkpoint(layer, *t, use_reentrant=False))
    forwards = [r for r in server.received if r.path == "/attention"]
    assert len(forwards) == 2
    assert forwards[0].options["dropout"] == forwards[1].options["dropout"]
    for got, want in zip(found, gradients(layer), strict=True):
        assert torch.equal(got, want)
    server.wait_free()


def test_hooks(client: Client, leaves: dict[str, torch.Tensor]) -> None:
    """Of tensors, of accumulated gradients, and of data-parallel training."""
    seen = []
    out = flash_attention(**leaves, client=client)
    out.register_hook(lambda grad: seen.append("out") or 2 * grad)
    leaves["q"].register_post_accumulate_grad_hook(lambda _: seen.append("q"))
    out.sum().backward()
    assert seen == ["out", "q"]
    want = flash_attention(**leaves, client=client).sum()
    assert leaves["q"].grad is not None
    torch.testing.assert_close(leaves["q"].grad, 2 * torch.autograd.grad(want, leaves["q"])[0])


def test_data_parallel_training(client: Client, tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.project(x)
            return flash_attention(y, y, x, client=client)

    layer, x = Layer(), torch.randn(1, 2, 3, 4)
    layer(x).sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(layer)(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    for p, want in zip(layer.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, want)


def test_threads_share_a_client(
    server: Any, client: Client, leaves: dict[str, torch.Tensor]
) -> None:
    def gradient(scale: float) -> torch.Tensor:
        out = flash_attention(leaves["q"], leaves["k"], leaves["v"], scale=scale, client=client)
        return torch.autograd.grad(out.square().sum(), leaves["q"])[0]

    scales = [0.1 * n for n in range(12)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(gradient, scales))
    for scale, got in zip(scales, found, strict=True):
        assert torch.equal(got, gradient(scale))
    assert server.residuals == {}


def test_the_default_client(server: Any, client: Client, leaves: dict[str, torch.Tensor]) -> None:
    q, k, v = (leaves[name].detach() for name in "qkv")
    with pytest.raises(TypeError, match=r"give client=, or call flashwire\.torch\.use"):
        flash_attention(q, k, v)
    with use(client):
        flash_attention(q, k, v)
        with Client(server.url, api_key="other") as other, use(other):
            flash_attention(q, k, v)
            assert server.last.headers["authorization"] == "Bearer other"
        flash_attention(q, k, v)
        assert "authorization" not in server.last.headers
    with pytest.raises(TypeError, match="no client"):
        flash_attention(q, k, v)
    use(client)
    flash_attention(q, k, v)
    use(None)
    with pytest.raises(TypeError, match=r"must be a flashwire\.Client, got str"):
        use("http://host")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no client"):
        flash_attention(q, k, v)

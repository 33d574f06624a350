"""The operators as torch sees them: opcheck, and torch.compile."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashwire import Client
from flashwire.torch import flash_attention, ops, scaled_dot_product_attention, use

MODIFIED = {"bias": (1, 1, 3, 3), "sinks": (2,)}
Leaves = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def draw(length: int = 3, **shapes: tuple[int, ...]) -> Leaves:
    generator = torch.Generator().manual_seed(3)
    all_shapes = dict.fromkeys("qkv", (1, 2, length, 4)) | shapes
    return {n: torch.randn(s, generator=generator).requires_grad_() for n, s in all_shapes.items()}


def step(run: Callable[..., torch.Tensor], leaves: Leaves) -> list[torch.Tensor]:
    """What a model returns, and its gradients."""
    out = run(**leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))]


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({}, {"keep": True}),
        (MODIFIED, {"keep": True, "return_lse": True, "causal": True}),
        (MODIFIED, {"keep": True, "residual": False}),
    ],
    ids=["plain", "modified", "not_kept"],
)
def test_opcheck(client: Client, shapes: Any, options: dict[str, Any]) -> None:
    arguments = (*ops.Tensors(**draw(**shapes)), *ops.Options(client.name, **options))
    torch.library.opcheck(torch.ops.flashwire.attention.default, arguments)


def test_opcheck_of_the_backward(client: Client) -> None:
    constants = {n: t.detach() for n, t in draw(**MODIFIED).items()}
    tensors, options = ops.Tensors(**constants), ops.Options(client.name, return_lse=True)
    out, lse, ticket = torch.ops.flashwire.attention(*tensors, *options)
    for needed in ([True] * 5, [True, False, True, False, True]):
        arguments = (out, lse, ticket, out, lse, *tensors, *options, needed)
        torch.library.opcheck(torch.ops.flashwire.attention_backward.default, arguments)


@pytest.mark.parametrize(
    ("q", "v", "layout", "packed", "lse"),
    [
        ((5, 3), (4, 2), None, False, (5,)),
        ((5, 3), (4, 2), "blhd", False, (5,)),
        ((2, 5, 3), (2, 4, 2), "bhld", False, (2, 5)),
        ((5, 2, 3), (4, 2, 2), "blhd", False, (2, 5)),
        ((1, 5, 2, 3), (1, 4, 2, 2), "blhd", False, (1, 2, 5)),
        ((5, 2, 3), (4, 2, 2), None, True, (5, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_shapes_are_known_without_a_server(
    q: tuple[int, ...],
    v: tuple[int, ...],
    layout: str | None,
    packed: bool,
    lse: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    given = {"q": q, "k": (*v[:-1], q[-1]), "v": v}
    tensors = {n: torch.empty(s, dtype=dtype, device="meta") for n, s in given.items()}
    if packed:
        offsets = torch.empty(3, dtype=torch.int32, device="meta")
        tensors |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets)
    options = ops.Options("nobody", layout=layout, return_lse=True)
    out, found, _ = torch.ops.flashwire.attention(*ops.Tensors(**tensors), *options)
    assert out.shape == (*q[:-1], v[-1])
    assert out.dtype == dtype
    assert found.shape == lse
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


class Model:
    """Compiled and as it is; how often the server was asked while compiling is noted."""

    def __init__(self, client: Client, **options: Any) -> None:
        self.client, self.options, self.graphs = client, options, 0

    def __call__(self, **x: torch.Tensor) -> torch.Tensor:
        x["q"] = x["q"] * 2
        return flash_attention(**x, client=self.client, **self.options).sin() + 1  # type: ignore[no-any-return,call-overload]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_is_one_graph(server: Any, client: Client, dynamic: bool) -> None:
    """Forward and backward, with the bits of the model as it is."""
    model = Model(client, causal=True, scale=0.3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (3, 3, 5):
        leaves = draw(length, bias=(1, 1, length, length), sinks=(2,))
        for got, want in zip(step(compiled, leaves), step(model, leaves), strict=True):
            assert torch.equal(got, want)
    assert len(server.received) == 3 * 4  # none of them for compiling
    assert server.residuals == {}


def test_dropout_and_a_default_client(server: Any, client: Client) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, k, v, dropout=0.25).cos()

    with use(client):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        step(compiled, draw())
        step(compiled, draw())
    seeds = [sent.options["dropout"]["seed"] for sent in server.received[::2]]
    assert len(set(seeds)) == 2, "each step draws anew"


def test_sdpa_in_a_compiled_model(client: Client) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return scaled_dot_product_attention(q, k, v, is_causal=True, client=client).float()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for got, want in zip(step(compiled, draw()), step(model, draw()), strict=True):
        assert torch.equal(got, want)


def test_inference_keeps_nothing(server: Any, client: Client) -> None:
    compiled = torch.compile(Model(client), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(**draw())
    assert "save_for_backward" not in server.last.options


def test_two_clients_are_two_graphs(server: Any, client: Client) -> None:
    """The client is a constant of the graph, and guarded."""
    with Client(server.url, api_key="second") as second:

        @torch.compile(backend="eager", fullgraph=True)
        def model(x: torch.Tensor, client: Client) -> torch.Tensor:
            return flash_attention(x, x, x, client=client)

        x = draw()["q"].detach()
        for owner in (client, second, client):
            model(x, owner)
    keys = [sent.headers.get("authorization") for sent in server.received]
    assert keys == [None, "Bearer second", None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_inductor(client: Client) -> None:
    model = Model(client, causal=True)
    compiled = torch.compile(model, fullgraph=True)
    for got, want in zip(step(compiled, draw()), step(model, draw()), strict=True):
        torch.testing.assert_close(got, want)

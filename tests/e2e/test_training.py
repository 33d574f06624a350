"""Gradients over the wire, through a real server: right, once, and of what was asked."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashwire_kernels
from flashwire import Client, errors
from flashwire import torch as remote
from flashwire.options import AttentionOptions
from load.relay import Relay


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


# Shapes of q, k, v and further leaves; options.
CHECKED: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "plain": ([(2, 2), (3, 2), (3, 1)], {}),
    "gqa": ([(1, 2, 2, 2), (1, 1, 2, 2), (1, 1, 2, 2)], {"causal": True}),
    "top_left": ([(2, 2), (3, 2), (3, 2)], {"causal": True, "causal_align": "top_left"}),
    "window": ([(3, 2), (3, 2), (3, 2)], {"window": (1, 0), "scale": -0.7}),
    "softcap": ([(2, 2), (2, 2), (2, 2)], {"softcap": 1.5, "scale": 2.0}),
    "alibi": ([(2, 2, 2)] * 3, {"alibi_slopes": torch.tensor([0.5, 0.25])}),
    "mask": ([(2, 2), (2, 2), (2, 2)], {"mask": torch.tensor([[True, False], [True, True]])}),
    "bias": ([(2, 2, 2)] * 3 + [(1, 2, 1)], {}),
    "sinks": ([(2, 2, 2)] * 3 + [(2,)], {}),
    "dropout": ([(3, 2), (3, 2), (3, 2)], {"dropout": 0.4, "seed": 2**64 - 5}),
    "blhd": ([(1, 3, 2, 2), (1, 2, 1, 2), (1, 2, 1, 2)], {"layout": "blhd"}),
    "packed": ([(4, 1, 2)] * 3, {"cu_seqlens_q": [0, 1, 3], "cu_seqlens_k": [0, 2, 4]}),
    "all": (
        [(1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 2), (2, 3), (2,)],
        {
            "causal": True, "window": (2, 0), "softcap": 3.0, "dropout": 0.3, "seed": 7,
            "alibi_slopes": torch.ones(2), "mask": torch.tensor([True, True, True]),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(client: Client, name: str) -> None:
    """Of out and lse, against finite differences in float64, element by element."""
    shapes, options = CHECKED[name]
    extra = {"bias": ["bias"], "sinks": ["sinks"], "all": ["bias", "sinks"]}.get(name, [])
    leaves = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def attention(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        more = dict(zip(extra, tensors[3:], strict=True))
        out, lse = remote.flash_attention(
            *tensors[:3], client=client, return_lse=True, backend="reference", **more, **options
        )
        return out, torch.where(lse.isfinite(), lse, 0.0)  # rows that see nothing

    assert torch.autograd.gradcheck(attention, leaves)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_step_moves_its_tensors_once(
    server: Any, return_lse: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """q, k, v and dout go up; out, dq, dk and dv come down (and lse): within 1%, HTTP included."""
    q, k, v = (draw(1, 8, 256, 64, seed=n, dtype=torch.float32) for n in range(3))
    dout = draw(1, 8, 256, 64, seed=3, dtype=torch.float32).detach()
    one = q.nbytes
    lse = q.nbytes // 64 if return_lse else 0
    with Relay((server.host, server.port)) as relay:
        with Client(f"http://127.0.0.1:{relay.port}") as client:
            found: Any = remote.flash_attention(
                q, k, v, client=client, causal=True, return_lse=return_lse
            )
            (found[0] if return_lse else found).backward(dout)
        up, down = relay.up, relay.down
    with capsys.disabled():
        print(f"\nbytes up {up} of {4 * one} expected, down {down} of {4 * one + lse}")
    assert up == pytest.approx(4 * one, rel=0.01)
    assert down == pytest.approx(4 * one + lse, rel=0.01)
    if return_lse:
        assert down > 4 * one + lse


def test_a_gradient_of_lse_goes_up_where_there_is_one(server: Any) -> None:
    q = draw(1, 2, 512, 4, dtype=torch.float32)
    with (
        Relay((server.host, server.port)) as relay,
        Client(f"http://127.0.0.1:{relay.port}") as client,
    ):
        sent = []
        for uses_lse in (False, True):
            before = relay.up
            out, lse = remote.flash_attention(q, q, q, client=client, return_lse=True)
            (out.sum() + lse.sum() if uses_lse else out.sum()).backward()
            sent.append(relay.up - before)
    assert sent[1] - sent[0] == pytest.approx(lse.nbytes, abs=200)


def test_a_restart_between_forward_and_backward(start_server: Callable[..., Any]) -> None:
    """The same gradients to the bit, and one warning for all layers."""
    leaves = {n: draw(1, 4, 33, 16, seed=i, dtype=torch.float32) for i, n in enumerate("qkv")}
    leaves |= {"bias": draw(33, 33, seed=4), "sinks": draw(4, seed=5)}
    options: dict[str, Any] = {"causal": True, "dropout": 0.2, "seed": 5, "softcap": 20.0}

    def loss(client: Client) -> torch.Tensor:
        x = leaves["q"]
        for _ in range(3):
            layer = {**leaves, "q": x}
            x = x + remote.flash_attention(**layer, client=client, **options)
        return x.square().sum()

    first = start_server()
    with Client(first.url) as client:
        wanted = torch.autograd.grad(loss(client), list(leaves.values()))
        total = loss(client)
        assert first.stop() == 0
        second = start_server("--port", str(first.port))
        with pytest.warns(errors.FlashwireWarning) as said:
            found = torch.autograd.grad(total, list(leaves.values()))
        assert len(said) == 1, [str(w.message) for w in said]
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
    second.check_unharmed()


def test_nothing_is_left_on_the_server(server: Any, client: Client) -> None:
    def held() -> float:
        lines = server.http.get("/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("flashwire_residual_bytes{")]
        return sum(float(line.rpartition(" ")[2]) for line in counts)

    def wait(until: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not until():
            assert time.monotonic() < end, held()
            time.sleep(0.02)

    q = draw(2, 8, 4)
    wait(lambda: held() == 0)
    kept = remote.flash_attention(q, q, q, client=client)
    dropped = remote.flash_attention(q, q, q, client=client)
    wait(lambda: held() > 0)
    kept.sum().backward()
    del dropped
    wait(lambda: held() == 0)


# Twins: the same call, here and there


def agree(there: Any, here: Any, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(there.sin().sum(), leaves),
        torch.autograd.grad(here.sin().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True, "scale": 0.3}, {"attn_mask": draw(7, 5, seed=9).detach() > -1},
    {"attn_mask": draw(7, 5, seed=9), "dropout_p": 0.3}, {"enable_gqa": True}, {"folded": True},
], ids=lambda options: "+".join(options) or "plain")  # fmt: skip
def test_sdpa_here_there_and_torchs(client: Client, options: dict[str, Any]) -> None:
    options = dict(options)
    lead = (2, 3, 4) if options.pop("folded", False) else (2, 4)
    heads = 2 if "enable_gqa" in options else 4
    q = draw(*lead, 7, 8)
    k, v = (draw(*lead[:-1], heads, 5, 8, seed=n) for n in (1, 2))
    here = flashwire_kernels.scaled_dot_product_attention
    with remote.use(client):
        torch.manual_seed(1)
        there = remote.scaled_dot_product_attention(q, k, v, **options)
        torch.manual_seed(1)
        agree(there, here(q, k, v, **options), [q, k, v])
        if "dropout_p" not in options:
            there = remote.scaled_dot_product_attention(q, k, v, **options)
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
            agree(there, theirs, [q, k, v])


@pytest.mark.parametrize("options", [
    {}, {"causal": True, "window_size": (2, 0), "softcap": 2.0}, {"dropout_p": 0.2},
    {"alibi_slopes": torch.tensor([1.0, 0.5]), "softmax_scale": 0.4, "deterministic": True},
], ids=lambda options: "+".join(options) or "plain")  # fmt: skip
def test_flash_attn_here_and_there(client: Client, options: dict[str, Any]) -> None:
    packed = [draw(8, 2, 4, seed=n) for n in range(3)]
    offsets = [torch.tensor([0, 3, 8], dtype=torch.int32)] * 2
    dense = [x.detach()[None].requires_grad_() for x in packed]
    calls: dict[str, tuple[Any, ...]] = {
        "flash_attn_func": tuple(dense),
        "flash_attn_varlen_func": (*packed, *offsets, 5, 5),
    }
    for name, arguments in calls.items():
        torch.manual_seed(1)
        there = getattr(remote, name)(*arguments, **options, client=client)
        torch.manual_seed(1)
        here = getattr(flashwire_kernels, name)(*arguments, **options)
        agree(there, here, list(arguments[:3]))
        if "dropout_p" not in options:
            found, wanted = (
                getattr(twin, name)(*arguments, **options, return_attn_probs=True, **more)
                for twin, more in ((remote, {"client": client}), (flashwire_kernels, {}))
            )
            assert found[2] is wanted[2] is None
            torch.testing.assert_close(found[1], wanted[1])


def test_what_the_remote_twins_refuse(client: Client) -> None:
    q = draw(1, 2, 4, 8).detach()
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    varlen = (q[0].mT.contiguous(), q[0], q[0], offsets, offsets)
    refused: dict[str, Callable[[], Any]] = {
        "attn_mask": lambda: remote.scaled_dot_product_attention(
            q, q, q, q[0, :, :4, :4] > 0, is_causal=True
        ),
        "query": lambda: remote.scaled_dot_product_attention(q, q[:, :1].expand(1, 3, 4, 8), q),
        "return_attn_probs": lambda: remote.flash_attn_func(q, q, q, 0.5, return_attn_probs=True),
        "block_table": lambda: remote.flash_attn_varlen_func(*varlen, 4, 4, block_table=offsets),
        "max_seqlen_k": lambda: remote.flash_attn_varlen_func(*varlen, 4, 3),
        "deterministic": lambda: remote.flash_attn_func(q, q, q, deterministic=1),  # type: ignore[arg-type]
        "window": lambda: remote.flash_attn_func(q, q, q, window_size=(-2, 0)),
    }
    with remote.use(client):
        for field, call in refused.items():
            with pytest.raises(errors.Invalid) as error:
                call()
            assert error.value.field == field


def test_twins_have_the_same_signature() -> None:
    for name in ("scaled_dot_product_attention", "flash_attn_func", "flash_attn_varlen_func"):
        there = dict(inspect.signature(getattr(remote, name)).parameters)
        assert there.pop("client").default is None
        here = inspect.signature(getattr(flashwire_kernels, name)).parameters
        assert [str(p) for p in there.values()] == [str(p) for p in here.values()]
    options = {*inspect.signature(flashwire_kernels.flash_attention).parameters}
    assert options == {"q", "k", "v", "return_lse", *AttentionOptions.__annotations__}

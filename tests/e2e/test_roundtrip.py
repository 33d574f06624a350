"""The clients against a real server: what goes out comes back as attention."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import flashwire
from flashwire import AsyncClient, Client, errors
from flashwire.torch import flash_attention
from flashwire_kernels import testing

RNG = np.random.default_rng(7)


def draw(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


def plain(q: Any, k: Any, v: Any, scale: float | None = None) -> tuple[Any, Any]:
    """Attention in float64 by its formula: the last two axes are length and head_dim."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    s = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    peak = s.max(-1, keepdims=True)
    p = np.exp(s - peak)
    total = p.sum(-1, keepdims=True)
    return p / total @ v, np.squeeze(peak + np.log(total), -1)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (3, 2, 5, 8)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_ranks_and_dtypes(client: Client, shape: tuple[int, ...], dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    q, k, v = (draw(*shape, dtype=kind) for _ in range(3))
    result = client.attention(q, k, v, return_lse=True)
    out, lse = plain(q, k, v)
    unit = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14}[dtype]
    assert (result.out.dtype, result.out.shape) == (kind, shape)
    assert result.lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert result.lse.shape == shape[:-1]
    np.testing.assert_allclose(result.out.astype(np.float64), out, rtol=unit, atol=unit)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-6)
    result.out[...] = 0  # its owner may write
    assert result.meta["backend"] == "cpu"


def test_layouts_agree(client: Client) -> None:
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 7, 8), draw(2, 2, 7, 6)
    usual = client.attention(q, k, v, causal=True).out
    turned = [np.swapaxes(x, 1, 2) for x in (q, k, v)]  # strided views, as they are
    other = client.attention(*turned, causal=True, layout="blhd").out
    np.testing.assert_array_equal(np.swapaxes(other, 1, 2), usual)
    assert usual.shape == (2, 4, 5, 6)


def test_packed_sequences_are_each_their_own(client: Client) -> None:
    q, k, v = draw(7, 4, 8), draw(9, 2, 8), draw(9, 2, 8)
    offsets_q, offsets_k = [0, 2, 2, 6], [0, 3, 5, 9]
    for given in ((offsets_q, offsets_k), (np.array(offsets_q, ">i4"), np.array(offsets_k, "i4"))):
        result = client.attention(
            q, k, v, cu_seqlens_q=given[0], cu_seqlens_k=given[1], causal=True, return_lse=True
        )
        for b in range(3):
            rows = slice(offsets_q[b], offsets_q[b + 1])
            keys = slice(offsets_k[b], offsets_k[b + 1])
            if rows.stop > rows.start:
                alone = client.attention(q[rows], k[keys], v[keys], causal=True, layout="blhd").out
                np.testing.assert_allclose(result.out[rows], alone, rtol=1e-5, atol=1e-6)
        assert not result.out[6].any()
        assert np.all(result.lse[6] == -np.inf)
        assert result.lse.shape == (7, 4)


def test_nothing_at_all(client: Client) -> None:
    for q_shape, k_shape in [((0, 2, 3, 4), (0, 2, 5, 4)), ((1, 2, 0, 4), (1, 2, 5, 4)),
                             ((1, 0, 3, 4), (1, 0, 5, 4))]:  # fmt: skip
        result = client.attention(draw(*q_shape), draw(*k_shape), draw(*k_shape), return_lse=True)
        assert result.out.shape == q_shape
    keyless = client.attention(draw(3, 4), draw(0, 4), draw(0, 4), return_lse=True)
    assert not keyless.out.any()
    assert np.all(keyless.lse == -np.inf)


# Backward


def test_residual_and_stateless_give_the_same_bits(client: Client) -> None:
    q, k, v, dout = draw(1, 4, 33, 16), draw(1, 2, 40, 16), draw(1, 2, 40, 16), draw(1, 4, 33, 16)
    bias, sinks, dlse = draw(4, 33, 40), draw(4), draw(1, 4, 33)
    options: dict[str, Any] = {"causal": True, "dropout": 0.2, "seed": 2**63 + 5, "softcap": 20.0}
    saved = client.attention(
        q, k, v, bias=bias, sinks=sinks, save_for_backward=True, return_lse=True, **options
    )
    asked: dict[str, Any] = {"bias_grad": True, "sinks_grad": True, "dlse": dlse}
    first = client.backward(saved, dout, **asked)
    second = client.backward(saved, dout, release=True, **asked)
    inputs: dict[str, Any] = {"bias": bias, "sinks": sinks, **options, **asked}
    with_out = client.gradients(q, k, v, dout, out=saved.out, lse=saved.lse, **inputs)
    recomputed = client.gradients(q, k, v, dout, **inputs)
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        want = getattr(first, name)
        assert want.any(), name
        for other in (second, with_out, recomputed):
            np.testing.assert_array_equal(getattr(other, name), want)
    assert first.dbias.shape == bias.shape
    with pytest.raises(errors.Gone):
        client.backward(saved, dout)
    client.release(saved)  # gone already: as good as freed
    with pytest.raises(errors.NotFound):
        client.backward("never", dout)


def test_gradients_are_those_of_finite_differences(client: Client) -> None:
    q, k, v, dout = (draw(2, 3, 4, dtype=np.float64) for _ in range(4))
    found = client.gradients(q, k, v, dout, causal=True)
    step = 1e-6
    for name, given in (("dq", q), ("dk", k), ("dv", v)):
        at = (1, 2, 3)
        ends = []
        for sign in (1, -1):
            moved = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
            moved[name[1:]][at] = given[at] + sign * step
            ends.append((client.attention(**moved, causal=True).out * dout).sum())
        assert getattr(found, name)[at] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


def test_a_drawn_seed_reproduces_its_dropout(client: Client) -> None:
    q, k, v = draw(1, 1, 20, 8), draw(1, 1, 20, 8), draw(1, 1, 20, 8)
    first = client.attention(q, k, v, dropout=0.5)
    again = client.attention(q, k, v, dropout=0.5, seed=first.meta["seed"])
    other = client.attention(q, k, v, dropout=0.5)
    np.testing.assert_array_equal(first.out, again.out)
    assert other.meta["seed"] != first.meta["seed"]
    assert not np.array_equal(other.out, first.out)
    assert "seed" not in client.attention(q, k, v).meta


# torch


def test_autograd_over_the_wire(client: Client) -> None:
    torch.manual_seed(0)
    made = [torch.randn(2, 3, 9, 8, dtype=torch.float64) for _ in range(3)]
    inputs = [t.requires_grad_() for t in made]
    out, lse = flash_attention(*inputs, client=client, causal=True, return_lse=True)
    (out.square().sum() + lse.sum()).backward()
    twins = [t.detach().clone().requires_grad_() for t in inputs]
    q, k, v = twins
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    s = (q @ k.mT / math.sqrt(8)).masked_fill(hidden, -torch.inf)
    ((s.softmax(-1) @ v).square().sum() + s.logsumexp(-1).sum()).backward()
    for ours, theirs in zip(inputs, twins, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_second_derivatives_are_refused_by_name(client: Client) -> None:
    q = torch.randn(4, 8, requires_grad=True)
    out = flash_attention(q, q, q, client=client)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(errors.SecondDerivative):
        first.sum().backward()


# The other ways to ask


async def test_async_is_the_same(server: Any, client: Client) -> None:
    q, k, v = draw(2, 9, 8), draw(2, 9, 8), draw(2, 9, 8)
    async with AsyncClient(server.url) as asking:
        result = await asking.attention(q, k, v, causal=True, save_for_backward=True)
        found = await asking.backward(result, np.ones_like(q), release=True)
        assert (await asking.info())["device"] == "cpu"
    np.testing.assert_array_equal(result.out, client.attention(q, k, v, causal=True).out)
    want = client.gradients(q, k, v, np.ones_like(q), causal=True)
    np.testing.assert_array_equal(found.dq, want.dq)


def test_json_gives_the_same_numbers(server: Any, client: Client) -> None:
    q, k, v = draw(3, 4), draw(5, 4), draw(5, 4)
    body = {name: x.astype(float).tolist() for name, x in zip("qkv", (q, k, v), strict=True)}
    asked = {"causal": True, "return_lse": True, "dropout": {"p": 0.3, "seed": str(2**64 - 1)}}
    reply = server.post("/attention", json=body | asked).json()
    want = client.attention(
        q, k, v, causal=True, return_lse=True, dropout=0.3, seed=2**64 - 1
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(reply["out"], np.float32), want.out)
    np.testing.assert_array_equal(np.array(reply["lse"], np.float32), want.lse)
    assert reply["meta"]["seed"] == "18446744073709551615"


def test_json_says_what_is_not_finite(server: Any) -> None:
    body = {"q": [[1], [1]], "k": [[1]], "v": [[2]], "mask": [[True], [False]], "return_lse": True}
    reply = server.post("/attention", json=body).json()
    assert reply["out"] == [[2.0], [0.0]]
    assert reply["lse"] == [1.0, "-Infinity"]
    seen = server.post("/attention", json={"q": [[1]], "k": [[1]], "v": [["Infinity"]]}).json()
    assert seen["out"] in ([["Infinity"]], [["NaN"]])


def test_replies_in_the_other_encoding(server: Any) -> None:
    body = {"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]]}
    reply = server.post("/attention", json=body, headers={"accept": "application/msgpack"})
    assert reply.headers["content-type"] == "application/msgpack"
    ref = flashwire.wire.decode(reply.content, flashwire.wire.REPLY).tensors["out"]
    ((at, size),) = ref.segments
    assert np.frombuffer(reply.content[at : at + size], "<f4").tolist() == [1, 2]


def test_a_large_payload_survives(client: Client) -> None:
    """One key: out is v, bit for bit, through memory and back."""
    v = RNG.standard_normal((1, 1, 1, 4_000_000)).astype(np.float32)
    one = np.ones((1, 1, 1, 1), np.float32)
    np.testing.assert_array_equal(client.attention(one, one, v).out, v)


# Within budget


@pytest.mark.parametrize("packed", [False, True])
def test_everything_at_once_is_within_budget(client: Client, packed: bool) -> None:
    case = testing.Case(
        batch=2, heads_q=4, heads_kv=2, len_q=37, len_k=53, dim=24, dim_v=40,
        lens_q=(37, 0, 12) if packed else None, lens_k=(53, 9, 12) if packed else None,
        padding=3 if packed else 0, causal=True, window=(20, 0), softcap=8.0, dropout=0.25,
        alibi="h", sinks=True, mask="bhqk", bias="1hqk",
    )  # fmt: skip
    made = testing.make(case)
    spec = made.spec
    options: dict[str, Any] = {
        "causal": spec.causal, "window": spec.window, "softcap": spec.softcap,
        "dropout": spec.dropout_p, "seed": spec.dropout_seed,
        **{name: t for name, t in made.tensors.items() if name not in "qkv"},
    }  # fmt: skip
    q, k, v = (made.tensors[name] for name in "qkv")
    report = client.check(q, k, v, backends=["cpu", "reference"], dout=made.dout, **options)
    assert report.passed, report
    assert report.tensors.keys() >= {"out", "lse", "dq", "dk", "dv"}
    assert all(entry.budget > 0 for entry in report.tensors.values())
    named = client.attention(q, k, v, backend="cpu", return_lse=True, **options)
    own = client.check(q, k, v, mine=named, **options)
    assert own.passed
    assert named.meta["backend"] == "cpu"
    spoilt = {"out": named.out * 1.001, "lse": named.lse}
    refuted = client.check(q, k, v, mine=spoilt, **options)
    assert not refuted.passed
    assert not refuted.tensors["out"].passed
    assert refuted.tensors["lse"].passed


def test_plan_agrees_with_what_is_sent(server: Any, client: Client) -> None:
    q = draw(1, 2, 64, 32)
    planned = client.plan(q.shape, dtype="float32", causal=True)
    assert planned.flops_fwd == 2 * 2 * (64 * 65 // 2) * (32 + 32)
    before = _counter(server, "flashwire_request_body_bytes_total")
    client.attention(q, q, q, causal=True)
    assert _counter(server, "flashwire_request_body_bytes_total") - before == planned.wire_bytes_up


def _counter(server: Any, name: str) -> float:
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise AssertionError(name)

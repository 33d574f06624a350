"""flashwire.jax against JAX's own gradients of attention by the book, on its CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashwire import Client
from flashwire.errors import Invalid, SecondDerivative
from flashwire.jax import flash_attention

B, HQ, HKV, L, D = 2, 4, 2, 7, 5
RNG = np.random.default_rng(0)
MASK = RNG.random((B, 1, L, L)) < 0.6
BIAS = RNG.standard_normal((1, HQ, L, L))
SINKS = RNG.standard_normal(HQ)
SLOPES = 0.5 ** np.arange(1, HQ + 1)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.7},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5, "causal": True},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS, "causal": True},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES},
    "layout": {"layout": "blhd", "causal": True, "sinks": SINKS},
}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def qkv() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.standard_normal((B, h, L, D))) for h in (HQ, HKV, HKV))


def by_the_book(
    q: Any, k: Any, v: Any, scale: float = D**-0.5, causal: bool = False, window: Any = None,
    softcap: float | None = None, mask: Any = True, bias: Any = 0.0, sinks: Any = None,
    alibi_slopes: Any = None, layout: str = "bhld",
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse), materialised."""
    if layout == "blhd":
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, HQ // HKV, 1) for x in (k, v))
    i, j = jnp.arange(L)[:, None], jnp.arange(L)
    s = scale * q @ jnp.swapaxes(k, 2, 3)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * jnp.abs(i - j)
    seen = mask & (j <= i if causal else True)
    if window is not None:
        seen = seen & (j >= i - window[0]) & (j <= i + window[1])
    s = jnp.where(seen, s + bias, -jnp.inf)
    ends = s if sinks is None else jnp.concatenate(
        [s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1
    )  # fmt: skip
    lse = jax.nn.logsumexp(ends, -1)
    out = jnp.exp(s - lse[..., None]) @ v
    return (jnp.swapaxes(out, 1, 2) if layout == "blhd" else out), lse


def loss_of(attend: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A function of the tensors that have gradients, with weights all different."""
    rest = {n: x for n, x in options.items() if n not in ("bias", "sinks")}

    def loss(tensors: dict[str, Any]) -> Any:
        out, lse = attend(**tensors, **rest)
        return sum((jnp.sin(jnp.arange(x.size)).reshape(x.shape) * x).sum() for x in (out, lse))

    return loss


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_jaxs(case: str, client: Client) -> None:
    options = {
        n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in CASES[case].items()
    }
    tensors = dict(zip("qkv", qkv(), strict=True))
    if options.get("layout") == "blhd":
        tensors = {name: jnp.swapaxes(x, 1, 2) for name, x in tensors.items()}
    tensors |= {name: options[name] for name in ("bias", "sinks") if name in options}

    def remote(**given: Any) -> tuple[jax.Array, jax.Array]:
        return flash_attention(**given, client=client, return_lse=True)

    value, gradients = jax.jit(jax.value_and_grad(loss_of(remote, options)))(tensors)
    want_value, want = jax.value_and_grad(loss_of(by_the_book, options))(tensors)
    assert jnp.allclose(value, want_value, rtol=1e-12)
    assert gradients.keys() == want.keys()
    for name, truth in want.items():
        assert jnp.allclose(gradients[name], truth, rtol=0, atol=1e-12), name


def test_packed_sequences_and_dropout(client: Client) -> None:
    """Against what the client gives without JAX."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (rng.standard_normal((9, h, D), np.float32) for h in (HQ, HKV, HKV, HQ))
    options: dict[str, Any] = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 4, 9]}
    options |= {"dropout": 0.4, "seed": 3, "causal": True}

    def loss(*tensors: Any) -> Any:
        return (flash_attention(*tensors, client=client, **options) * dout).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*map(jnp.asarray, (q, k, v)))
    want = client.gradients(q, k, v, dout, **options)
    for got, truth in zip(gradients, (want.dq, want.dk, want.dv), strict=True):
        assert got.dtype == jnp.float32
        assert jnp.allclose(got, truth, rtol=0, atol=1e-5)


def test_bfloat16_comes_back_as_it_went(client: Client) -> None:
    tensors = [x.astype(jnp.bfloat16) for x in qkv()]

    def total(*given: Any) -> Any:
        return flash_attention(*given, client=client, causal=True).astype(jnp.float32).sum()

    out, lse = flash_attention(*tensors, client=client, causal=True, return_lse=True)
    want, want_lse = by_the_book(*(x.astype(jnp.float64) for x in tensors), causal=True)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert jnp.allclose(out, want, atol=2**-7)
    assert jnp.allclose(lse, want_lse, atol=1e-5)
    assert {x.dtype for x in jax.grad(total, (0, 1, 2))(*tensors)} == {jnp.dtype(jnp.bfloat16)}


def test_vmap_asks_once_for_each(client: Client) -> None:
    stacked = [jnp.stack([x, 2 * x, -x]) for x in qkv()]

    def total(*given: Any) -> Any:
        return flash_attention(*given, client=client, causal=True).sum()

    got = jax.jit(jax.vmap(jax.grad(total)))(*stacked)
    for n in range(3):
        assert jnp.allclose(got[n], jax.grad(total)(*(x[n] for x in stacked)), atol=1e-12)


def test_what_has_no_gradient_is_refused_by_name(client: Client) -> None:
    q, k, v = qkv()

    def total(q: Any, **options: Any) -> Any:
        return flash_attention(q, k, v, client=client, **options).sum()

    with pytest.raises(SecondDerivative):
        jax.grad(lambda q: jax.grad(total)(q).sum())(q)
    with pytest.raises(SecondDerivative):
        jax.jit(jax.hessian(total))(q)
    with pytest.raises(Invalid, match="alibi_slopes"):
        jax.grad(lambda slopes: total(q, alibi_slopes=slopes))(jnp.asarray(SLOPES))
    with pytest.raises(Invalid, match="seed"):
        total(q, dropout=0.1)
    with pytest.raises(TypeError, match="did you mean 'causal'"):
        total(q, casual=True)
    with pytest.raises(TypeError, match=r"flashwire\.Client"):
        flash_attention(q, k, v, client=None)  # type: ignore[call-overload]


def test_a_refusal_of_the_servers_says_why(client: Client) -> None:
    q, k, v = qkv()
    with pytest.raises(jax.errors.JaxRuntimeError, match="head_dim must be q's"):
        jax.block_until_ready(flash_attention(q, k[..., :2], v, client=client))

"""flash_attention under autograd."""

import pytest
import torch

from flashwire_kernels import InvalidAttention, SecondDerivative, api, flash_attention
from flashwire_kernels.types import AttentionSpec


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def qkv(*shape, dtype=torch.float64):
    return tuple(leaf(*shape, dtype=dtype, seed=seed) for seed in range(3))


@pytest.mark.parametrize("options", [
    {},
    {"causal": True, "layout": "blhd"},
    {"window": (2, 1), "softcap": 2.0, "scale": 0.5},
    {"dropout": 0.3, "seed": 11, "backend": "reference"},
    {"dropout": 0.3, "seed": 11, "causal_align": "top_left", "causal": True},
], ids=str)  # fmt: skip
def test_gradients_against_finite_differences(options):
    """Of out and lse together, to q, k, v, bias and sinks."""

    def attention(q, k, v, bias, sinks):
        return flash_attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **options)

    heads, length = (3, 5) if options.get("layout") != "blhd" else (5, 3)
    sinks = leaf(length if options.get("layout") == "blhd" else heads, seed=8)
    q, k, v = qkv(2, heads, length, 4)
    bias = leaf(1, 1, *((length, length) if heads == 3 else (heads, heads)), seed=7)
    if options.get("layout") == "blhd":
        sinks, bias = leaf(length, seed=8), leaf(heads, 1, seed=7)
    assert torch.autograd.gradcheck(attention, (q, k, v, bias, sinks))


def test_packed():
    q, k, v = qkv(7, 2, 4)

    def attention(q, k, v):
        return flash_attention(q, k, v, cu_seqlens_q=[0, 3, 6], cu_seqlens_k=[0, 4, 5])

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_lse_alone_has_a_gradient():
    """K31: scale 1, q 0, keys 2 and 4."""
    q = torch.zeros(1, 1, requires_grad=True)
    k = torch.tensor([[2.0], [4.0]], requires_grad=True)
    v = torch.ones(2, 1, requires_grad=True)
    _, lse = flash_attention(q, k, v, scale=1.0, return_lse=True)
    lse.sum().backward()
    assert q.grad.item() == pytest.approx(3)
    assert k.grad.tolist() == [[0], [0]]
    assert v.grad.tolist() == [[0], [0]]


def test_gradients_of_out_and_lse_add_up():
    q, k, v = qkv(2, 6, 4)
    out, lse = flash_attention(q, k, v, return_lse=True)
    of_both = torch.autograd.grad((out.sum() + lse.sum()), (q, k, v), retain_graph=True)
    of_out = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    of_lse = torch.autograd.grad(lse.sum(), (q, k, v))
    for both, a, b in zip(of_both, of_out, of_lse, strict=True):
        torch.testing.assert_close(both, a + b)


def test_only_what_is_needed_is_given():
    q, k, v = qkv(2, 6, 4)
    bias = leaf(6, 6, seed=5)
    k.requires_grad_(False)
    bias.requires_grad_(False)
    flash_attention(q, k, v, bias=bias).sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert k.grad is None
    assert bias.grad is None


def test_the_gradient_of_bias_is_not_computed_unasked(monkeypatch):
    asked = []
    backward = api.backward
    monkeypatch.setattr(
        api, "backward", lambda *a, **kw: asked.append(kw["wanted"]) or backward(*a, **kw)
    )
    q, k, v = qkv(2, 6, 4)
    bias, sinks = leaf(6, 6, seed=5), leaf(2, seed=6)
    flash_attention(q, k, v, bias=bias.detach(), sinks=sinks).sum().backward()
    assert [(w.bias, w.sinks) for w in asked] == [(False, True)]


def test_the_backward_runs_where_the_forward_did(monkeypatch):
    ran = []

    def noting(run):
        def call(*args, **kwargs):
            found = run(*args, **kwargs)
            ran.append(found.backend)
            return found

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(api, name, noting(getattr(api, name)))
    for backend in ("auto", "reference"):
        flash_attention(*qkv(2, 6, 4), backend=backend).sum().backward()
    assert ran == ["cpu", "cpu", "reference", "reference"]


def test_second_derivatives_are_refused_by_name():
    q, k, v = qkv(2, 6, 4)
    (dq,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    assert dq.isfinite().all()
    with pytest.raises(SecondDerivative):
        torch.autograd.grad(dq.sum(), q)


def test_a_graph_may_be_walked_twice():
    q, k, v = qkv(2, 6, 4)
    out = flash_attention(q, k, v, dropout=0.2)
    first, second = (torch.autograd.grad(out.sum(), q, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_without_grad_nothing_is_kept():
    q, k, v = qkv(2, 6, 4)
    with torch.no_grad():
        out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.grad_fn is None
    assert lse.grad_fn is None
    assert flash_attention(*(t.detach() for t in (q, k, v))).grad_fn is None


def test_a_changed_input_is_noticed():
    q, k, v = qkv(2, 6, 4)
    mask = torch.ones(6, 6, dtype=torch.bool)
    out = flash_attention(q, k, v, mask=mask)
    mask[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_gradient_of_alibi_slopes_is_refused():
    q, k, v = qkv(2, 6, 4)
    slopes = leaf(2, seed=4)
    with pytest.raises(InvalidAttention) as error:
        flash_attention(q, k, v, alibi_slopes=slopes)
    assert [v.field for v in error.value.violations] == ["alibi_slopes"]
    with torch.no_grad():
        flash_attention(q, k, v, alibi_slopes=slopes)


class TestSeed:
    def test_is_drawn_from_torchs_generator(self):
        q, k, v = qkv(1, 64, 4)
        torch.manual_seed(5)
        first, second = (flash_attention(q, k, v, dropout=0.5) for _ in range(2))
        assert not torch.equal(first, second)
        torch.manual_seed(5)
        assert torch.equal(first, flash_attention(q, k, v, dropout=0.5))

    def test_is_left_alone_without_dropout(self):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        flash_attention(*qkv(1, 8, 4))
        flash_attention(*qkv(1, 8, 4), dropout=0.5, seed=1)
        assert torch.equal(before, torch.get_rng_state())

    def test_is_used_as_given(self):
        q, k, v = qkv(1, 64, 4)
        spec = AttentionSpec(dropout_p=0.5, dropout_seed=2**64 - 1)
        want = api.forward(q, k, v, spec=spec).out
        assert torch.equal(flash_attention(q, k, v, dropout=0.5, seed=2**64 - 1), want)


def test_a_strided_gradient_gives_the_same_bits():
    """K11"""
    g = torch.arange(24.0).reshape(1, 3, 2, 4).transpose(1, 2)
    found = []
    for gradient in (g, g.contiguous()):
        q, k, v = qkv(1, 2, 3, 4, dtype=torch.float32)
        flash_attention(q, k, v).backward(gradient)
        found.append((q.grad, k.grad, v.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)

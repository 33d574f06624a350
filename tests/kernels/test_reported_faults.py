"""Faults that users of comparable software reported in public, as small inputs with right results.

Each stands for its kind; the case's id and its source are in the test's docstring.
"""

import math

import pytest
import torch

from flashwire_kernels import api
from flashwire_kernels.errors import InvalidAttention
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec

NAN, INF = math.nan, math.inf


def f32(values):
    return torch.tensor(values, dtype=torch.float32)


def rows(*values, dtype=torch.float32):
    """(L, 1): a sequence of numbers with head_dim 1."""
    return torch.tensor(values, dtype=dtype)[:, None]


def assert_near(got, want, tolerance=1e-5):
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.double().reshape(want.shape), want, rtol=0, atol=tolerance)


def both_ways(backend, dout, q, k, v, *, spec, dlse=None, **options):
    """forward, and gradients from its out and lse."""
    f = api.forward(q, k, v, spec=spec, backend=backend, **options)
    g = api.backward(
        dout, q, k, v, out=f.out, lse=f.lse, dlse=dlse, spec=spec, backend=backend,
        wanted=Wanted(bias="bias" in options, sinks="sinks" in options), **options,
    )  # fmt: skip
    return f, g.gradients


def test_k01_a_row_that_a_mask_hides_wholly(backend):
    """pytorch/pytorch#103963"""
    q = f32([[1, 0], [0, 1]])
    v, mask = f32([[1, 2], [3, 4]]), torch.tensor([[True, False], [False, False]])
    f, g = both_ways(backend, torch.ones(2, 2), q, q.clone(), v, spec=AttentionSpec(), mask=mask)
    assert_near(f.out, [[1, 2], [0, 0]])
    assert_near(f.lse, [0.707107, -INF])
    assert_near(g.dv, [[1, 1], [0, 0]])
    assert_near(g.dq, [[0, 0], [0, 0]])
    assert_near(g.dk, [[0, 0], [0, 0]])


@pytest.mark.parametrize(("align", "out", "lse"), [
    ("bottom_right", [6, 0], 1.098612), ("top_left", [3, 0], 0.0)])  # fmt: skip
def test_k03_the_corner_of_the_causal_triangle(backend, align, out, lse):
    """pytorch/executorch#22426"""
    k, v = f32([[1, 0], [2, 0], [3, 0]]), f32([[3, 0], [6, 0], [9, 0]])
    spec = AttentionSpec(causal=True, causal_align=align)
    f = api.forward(f32([[0, 0]]), k, v, spec=spec, backend=backend)
    assert_near(f.out, [out])
    assert_near(f.lse, [lse])


def test_k05_packed_queries_of_length_one_beside_an_empty_segment(backend):
    """Dao-AILab/flash-attention#1537"""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, h, 16, generator=g).bfloat16() for n, h in ((2, 3), (8, 1), (8, 1)))
    offsets = {"cu_seqlens_q": [0, 1, 1, 2], "cu_seqlens_k": [0, 3, 3, 8]}
    spec = AttentionSpec(causal=True)
    f = api.forward(q, k, v, spec=spec, backend=backend, **offsets)
    assert f.out.shape == (2, 3, 16)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        dense = [q[row, :, None], k[keys].transpose(0, 1), v[keys].transpose(0, 1)]
        alone = api.forward(*dense, spec=spec, backend=backend)
        assert torch.equal(f.out[row], alone.out[:, 0])
        assert torch.equal(f.lse[row], alone.lse[:, 0])


def test_k07_rows_beyond_the_last_offset(backend):
    """pytorch/pytorch#186786"""
    g = torch.Generator().manual_seed(7)
    q, k, v, dout = (torch.randn(6, 2, 8, generator=g) for _ in range(4))
    offsets = {"cu_seqlens_q": [0, 2, 4], "cu_seqlens_k": [0, 2, 4]}
    f, grads = both_ways(backend, dout, q, k, v, spec=AttentionSpec(), **offsets)
    assert (f.lse[4:] == -INF).all()
    for t in (f.out, grads.dq, grads.dk, grads.dv):
        assert (t[4:] == 0).all()
        assert (t[:4] != 0).any(-1).all()


@pytest.mark.parametrize("length", [1, 17, 127, 129, 192])
def test_k09_lengths_that_fill_no_tile(backend, length):
    """jax-ml/jax#27224"""
    ones = torch.ones(length, 16)
    v = torch.arange(length, dtype=torch.float32)[:, None].expand(length, 16)
    f, g = both_ways(backend, ones, ones, ones, v, spec=AttentionSpec())
    torch.testing.assert_close(f.out, torch.full((length, 16), (length - 1) / 2), rtol=1e-5, atol=0)
    assert_near(f.lse, [4 + math.log(length)] * length)
    if length == 129:
        assert_near(f.lse[:1], [8.859812])
        assert_near(g.dv, torch.ones(129, 16))
        # q is constant, so each key's score gradient, 4 (j - 64) of it, is the sum over all rows
        assert_near(g.dq, torch.zeros(129, 16), 1e-3)
        dk = (4.0 * torch.arange(129) - 256)[:, None].expand(129, 16)
        torch.testing.assert_close(g.dk, dk, rtol=1e-5, atol=1e-3)


def test_k11_a_transposed_gradient(backend):
    """Dao-AILab/flash-attention#355"""
    g = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(1, 2, 3, 4, generator=g) for _ in range(3))
    dout = torch.arange(24.0).reshape(1, 3, 2, 4).transpose(1, 2)
    spec = AttentionSpec()
    strided = both_ways(backend, dout, q, k, v, spec=spec)[1]
    contiguous = both_ways(backend, dout.contiguous(), q, k, v, spec=spec)[1]
    exact = both_ways("reference", dout, q, k, v, spec=spec)[1]
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(strided, name), getattr(contiguous, name))
        torch.testing.assert_close(getattr(strided, name), getattr(exact, name))


def test_k13_query_heads_share_key_heads_in_blocks(backend):
    """ekzhang/jax-js#180"""
    q, kv = torch.zeros(4, 1, 1), f32([10, 20]).reshape(2, 1, 1)
    assert_near(api.forward(q, kv, kv, backend=backend).out, [10, 10, 20, 20])
    with pytest.raises(InvalidAttention, match="heads must divide"):
        api.forward(q[:3], kv, kv, backend=backend)


@pytest.mark.parametrize("shape", [(65536, 1, 1, 8), (1, 65536, 1, 8)])
def test_k15_more_heads_than_a_launch_dimension_holds(backend, shape):
    """pytorch/pytorch#142228"""
    if backend == "triton":
        pytest.skip("65536 programs are for a GPU, not for an interpreter")
    v = (torch.arange(65536) % 1000).half()[:, None].expand(65536, 8).reshape(shape)
    q = torch.ones(shape, dtype=torch.float16)
    assert torch.equal(api.forward(q, q, v, backend=backend).out, v)


def test_k17_a_window_counts_keys_beside_the_diagonal(backend):
    """huggingface/transformers#39408"""
    zeros, v = torch.zeros(5, 1), rows(0.0, 1, 2, 3, 4)

    def windowed(window):
        spec = AttentionSpec(causal=True, window=window)
        return api.forward(zeros, zeros, v, spec=spec, backend=backend)

    f = windowed((2, 0))
    assert_near(f.out, [0, 0.5, 1, 2, 3])
    assert_near(f.lse, [0, 0.693147, 1.098612, 1.098612, 1.098612])
    assert_near(windowed((0, 0)).out, v[:, 0], 0)
    for wide in ((4, 0), (-1, 0)):
        assert torch.equal(windowed(wide).out, windowed(None).out)
        assert torch.equal(windowed(wide).lse, windowed(None).lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k19_a_softcap_of_huge_scores(backend, dtype):
    """vllm-project/vllm#56579"""
    q, k, v = rows(100, dtype=dtype), rows(100, -100, 0, dtype=dtype), rows(1, 2, 3, dtype=dtype)
    spec = AttentionSpec(scale=1, softcap=50)
    f, g = both_ways(backend, torch.ones(1, 1, dtype=dtype), q, k, v, spec=spec)
    assert_near(f.out, [1])
    assert_near(f.lse, [50])
    assert_near(g.dv, [1, 0, 0])
    assert_near(g.dq, [0])
    assert_near(g.dk, [0, 0, 0])


def test_k21_slopes_per_batch_row(backend):
    """Dao-AILab/flash-attention#1585"""
    q, k = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 2, 1)
    v = f32([0, 1]).reshape(1, 1, 2, 1).expand(2, 1, 2, 1)

    def sloped(slopes):
        spec = AttentionSpec(causal=True)
        return api.forward(q, k, v, spec=spec, alibi_slopes=f32(slopes), backend=backend)

    f = sloped([[1], [0]])
    assert_near(f.out, [0.731059, 0.5])
    assert_near(f.lse, [0.313262, 0.693147])
    assert_near(sloped([1]).out, [0.731059, 0.731059])
    for wrong in ([1, 0], [[1], [0], [0]]):
        with pytest.raises(InvalidAttention, match="alibi_slopes: must have shape"):
            sloped(wrong)


@pytest.mark.parametrize(("scale", "out", "lse"), [
    (0.0, [1, 1.5, 2], [0, 0.693147, 1.098612]),
    (None, [1, 1.268941, 2.903016], [4, 2.313262, 9.050946])])  # fmt: skip
def test_k23_a_scale_of_zero_is_a_scale(backend, scale, out, lse):
    """SKaiNET-developers/SKaiNET#860"""
    q, v = rows(2.0, 1, 3), rows(1.0, 2, 3)
    f, g = both_ways(
        backend, torch.ones(3, 1), q, q, v, spec=AttentionSpec(causal=True, scale=scale)
    )
    assert_near(f.out, out)
    assert_near(f.lse, lse)
    assert (g.dq == 0).all() == (g.dk == 0).all() == (scale == 0)


def test_k25_the_lowest_finite_half_hides_nothing(backend):
    """huggingface/transformers#17306"""
    half = torch.float16
    q, k, v = rows(4, dtype=half), rows(-8, -4, dtype=half), rows(1, 2, dtype=half)
    bias = torch.tensor([-65504.0, -65504.0], dtype=half)
    f, g = both_ways(
        backend, torch.ones(1, 1, dtype=half), q, k, v, spec=AttentionSpec(scale=1), bias=bias
    )
    assert_near(f.out, [2])
    assert f.lse.dtype == torch.float32
    assert_near(f.lse, [-65520], 0.01)
    for t in (g.dq, g.dk, g.dv, g.dbias):
        assert t.isfinite().all()
    hidden = api.forward(q, k, v, spec=AttentionSpec(scale=1), bias=bias * INF, backend=backend)
    assert_near(hidden.lse, [-INF])


def test_k27_float32_products_are_float32(backend):
    """triton-lang/triton#8407"""
    q, k = torch.zeros(1, 16), torch.zeros(2, 16)
    q[0, :2] = f32([1024.25, 1])
    k[0, 0], k[1, 1] = 1, 1024
    v = f32([0, 1])[:, None].expand(2, 16)
    f = api.forward(q, k, v, spec=AttentionSpec(scale=1), backend=backend)
    assert_near(f.out, [[0.437823] * 16], 1e-4)
    assert_near(f.lse, [1024.826], 1e-3)
    assert f.precision == "ieee"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_k29_lse_is_in_natural_units(backend, packed, dtype):
    """pytorch/pytorch#181645"""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("triton has no float64")
    q, k = torch.zeros(3, 2, 1, dtype=dtype), torch.zeros(4, 2, 1, dtype=dtype)
    offsets = {"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 4]}
    if packed:
        f = api.forward(q, k, k, backend=backend, **offsets)
    else:
        dense = [t.transpose(0, 1)[None] for t in (q, k, k)]
        f = api.forward(*dense, backend=backend)
    assert f.lse.shape == ((3, 2) if packed else (1, 2, 3))
    assert f.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_near(f.lse, torch.full(f.lse.shape, 1.386294), 1e-6)


def test_k31_a_gradient_on_lse(backend):
    """Dao-AILab/flash-attention#889"""
    q, k, v, spec = rows(0.0), rows(2.0, 4), rows(5.0, 7), AttentionSpec(scale=1)
    nothing, one = torch.zeros(1, 1), torch.ones(1)
    _, of_lse = both_ways(backend, nothing, q, k, v, spec=spec, dlse=one)
    assert_near(of_lse.dq, [3])
    assert_near(of_lse.dk, [0, 0])
    assert (of_lse.dv == 0).all()
    _, of_out = both_ways(backend, one[:, None], q, k, v, spec=spec)
    _, of_both = both_ways(backend, one[:, None], q, k, v, spec=spec, dlse=one)
    for name in ("dq", "dk", "dv"):
        assert_near(getattr(of_both, name), getattr(of_out, name) + getattr(of_lse, name))


def test_k33_sinks_alike_in_long_and_single_queries(backend):
    """ml-explore/mlx#3452"""
    zeros, v, sink = torch.zeros(3, 1), rows(3.0, 6, 9), torch.zeros(1)
    f = api.forward(zeros, zeros, v, spec=AttentionSpec(causal=True), sinks=sink, backend=backend)
    assert_near(f.out, [1.5, 3, 4.5])
    assert_near(f.lse, [0.693147, 1.098612, 1.386294])
    alone = api.forward(zeros[:1], zeros, v, sinks=sink, backend=backend)
    assert_near(alone.out, [4.5])
    assert_near(alone.lse, [1.386294])
    one = torch.ones(1, 1)
    _, g = both_ways(backend, one, zeros[:1], zeros[:1], one, spec=AttentionSpec(), sinks=sink)
    assert_near(g.dsinks, [-0.25])
    many = [t.expand(5, 2, 1, 1) for t in (one, torch.zeros(1, 1), torch.zeros(1, 1), one)]
    _, g = both_ways(backend, *many, spec=AttentionSpec(), sinks=torch.zeros(2))
    assert_near(g.dsinks, [-1.25, -1.25])


def test_k35_dropout_follows_its_seed(backend):
    """Dao-AILab/flash-attention#2088"""
    q, ones = torch.zeros(64, 16), torch.ones(64, 16)

    def dropped(p, seed):
        return both_ways(
            backend, ones, q, q, ones, spec=AttentionSpec(dropout_p=p, dropout_seed=seed)
        )

    (first, g), (again, g_again), (other, _) = dropped(0.5, 1), dropped(0.5, 1), dropped(0.5, 2)
    assert torch.equal(first.out, again.out)
    assert torch.equal(g.dv, g_again.dv)
    assert not torch.equal(first.out, other.out)
    kept = first.out[:, 0] * 64 / 2  # out is (kept / 64) * 2
    assert_near(kept, kept.round(), 1e-4)
    assert_near(g.dv.sum() / 16, first.out[:, 0].sum(), 1e-4)  # the same pattern, transposed
    plain = api.forward(q, q, ones, backend=backend)
    assert torch.equal(dropped(0.0, 1)[0].out, plain.out)
    for p in (1.0, -0.1, NAN):
        with pytest.raises(InvalidAttention, match=r"dropout: p must be in \[0, 1\)"):
            AttentionSpec(dropout_p=p, dropout_seed=1)


def test_k37_nan_at_a_hidden_key(backend):
    """Dao-AILab/flash-attention#1745"""
    q, k, v = rows(1.0), rows(2.0, NAN), rows(7.0, NAN)
    mask = torch.tensor([True, False])
    f, g = both_ways(backend, torch.ones(1, 1), q, k, v, spec=AttentionSpec(), mask=mask)
    assert_near(f.out, [7])
    assert_near(f.lse, [2])
    assert_near(g.dq, [0])
    assert_near(g.dk, [0, 0])
    assert_near(g.dv, [1, 0])


def test_k39_a_mask_is_boolean_and_a_bias_is_added(backend):
    """huggingface/diffusers#14342"""
    q, k, v = rows(0.0), rows(0.0, 0), rows(1.0, 3)

    def out(**options):
        return api.forward(q, k, v, backend=backend, **options).out

    yes_no = torch.tensor([True, False])
    for shape in ((2,), (1, 2), (1, 1, 1, 2)):
        assert_near(out(mask=yes_no.reshape(shape)), [1])
    assert_near(out(bias=f32([0, -INF])), [1])
    assert_near(out(bias=f32([1, 0])), [1.537883])
    for dtype in (torch.uint8, torch.int64):
        with pytest.raises(InvalidAttention, match="mask: must be boolean"):
            out(mask=yes_no.to(dtype))
        with pytest.raises(InvalidAttention, match="bias: must be floating point"):
            out(bias=yes_no.to(dtype))
    for shape in ((2, 1), (3,)):
        with pytest.raises(InvalidAttention, match="mask: must broadcast"):
            out(mask=torch.ones(shape, dtype=torch.bool))


def test_s02_a_single_key_gives_its_value_back_bit_for_bit(backend):
    """triton-inference-server/client#897"""
    v = torch.tensor([[0.01, 1.0, -2.5, 3e38]], dtype=torch.bfloat16)
    q = torch.ones(1, 8, dtype=torch.bfloat16)
    out = api.forward(q, q, v, backend=backend).out
    assert torch.equal(out.view(torch.int16), v.view(torch.int16))
    assert out.view(torch.int16)[0, 0] == 0x3C24

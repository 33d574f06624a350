"""The operators as torch sees them: opcheck, torch.compile, autocast, checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashwire_kernels import InvalidAttention, flash_attention, ops


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch.compiler.reset()


def draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape))
    return [
        torch.randn(shape, generator=generator).to(dtype).detach().requires_grad_() for _ in "qkv"
    ]


def options(**given):
    plain = {"causal": False, "causal_align": "bottom_right", "dropout": 0.0, "precision": "ieee",
             "backend": "auto"}  # fmt: skip
    return ops.Options(**(dict.fromkeys(ops.Options._fields) | plain | given))


@pytest.mark.parametrize(
    ("shape", "given"),
    [((2, 3, 4), {"causal": True}), ((2, 3, 2, 4), {"layout": "blhd", "window": [1, -1]})],
    ids=["rank_3", "blhd"],
)
def test_opcheck(shape, given):
    q, k, v = draw(*shape)
    bias, sinks = torch.randn(3, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    tensors = ops.Tensors(q, k, v, bias=bias, sinks=sinks)
    torch.library.opcheck(
        torch.ops.flashwire_kernels.attention.default, (*tensors, *options(**given))
    )


def test_opcheck_of_the_backward():
    q, k, v = (x.detach() for x in draw(3, 2, 4))
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    tensors = ops.Tensors(q, k, v, sinks=torch.ones(2), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    out, lse = ops.attention(tensors, options())
    arguments = (out, lse, out, lse, *tensors, *options(), [True, False, True, False, True])
    torch.library.opcheck(torch.ops.flashwire_kernels.attention_backward.default, arguments)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_a_model_is_one_graph(layout):
    """Forward and backward, for lengths of all kinds, with the bits of the model as it is."""

    def model(q, k, v):
        out, lse = flash_attention(
            q * 2, k, v, causal=True, layout=layout, dropout=0.25, seed=2**64 - 1, return_lse=True
        )
        return out.sin().sum() + lse.sum()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (3, 6):
        inputs = draw(1, length, 2, 4)
        found, wanted = (torch.autograd.grad(run(*inputs), inputs) for run in (compiled, model))
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_is_that_of_sdpa(dtype):
    q, k, v = draw(1, 2, 3, 4, dtype=dtype)
    bias = torch.randn(3, 3, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
        ours = flash_attention(q, k, v, bias=bias)
    assert ours.dtype == theirs.dtype
    ours.sum().backward()
    assert q.grad.dtype == bias.grad.dtype == dtype


def test_dtype_rounds_on_the_way():
    q, k, v = draw(2, 3, 4)
    out = flash_attention(q, k, v, dtype=torch.bfloat16)
    assert torch.equal(out, flash_attention(*(x.bfloat16() for x in (q, k, v))))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_drops_the_same_again(reentrant):
    def gradients(run):
        q, k, v = draw(1, 2, 8, 4)
        torch.manual_seed(3)
        run(q, k, v).square().sum().backward()
        return q.grad, k.grad, v.grad

    def layer(*qkv):
        return flash_attention(*qkv, dropout=0.5)

    found = gradients(lambda *qkv: checkpoint(layer, *qkv, use_reentrant=reentrant))
    for got, want in zip(found, gradients(layer), strict=True):
        assert torch.equal(got, want)


def test_other_arrays_are_refused_by_name():
    q, k, v = draw(2, 3, 4)
    with pytest.raises(InvalidAttention, match=r"k: must be a torch\.Tensor, got list") as error:
        flash_attention(q, k.tolist(), v, sinks=[1.0, 2.0])
    assert [wrong.field for wrong in error.value.violations] == ["k", "sinks"]
    with pytest.raises(InvalidAttention, match="window: must be a pair"):
        flash_attention(q, k, v, window=3)
    with pytest.raises(InvalidAttention, match="seed must be an integer in"):
        flash_attention(q, k, v, dropout=0.5, seed=-1)

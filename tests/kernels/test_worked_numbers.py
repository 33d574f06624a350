"""Numbers worked by hand, and a window written as others write it."""

import math

import pytest
import torch

from flashwire_kernels import api
from flashwire_kernels.types import AttentionSpec

ONE = torch.ones(1, 1)


def test_lse_streamed_in_blocks_of_two(backend):
    scores = torch.tensor([[3.0], [1.0], [6.0], [2.0]])
    blocks = [
        api.forward(ONE, keys, keys, spec=AttentionSpec(scale=1), backend=backend).lse
        for keys in (scores, scores[:2], scores[2:])
    ]
    whole, first, second = (float(block) for block in blocks)
    by_hand = 6 + math.log(1 + math.exp(-3) + math.exp(-5) + math.exp(-4))
    assert by_hand == pytest.approx(6.0722, abs=5e-5)
    assert whole == pytest.approx(by_hand, abs=1e-6)
    top = max(first, second)
    streamed = top + math.log(math.exp(first - top) + math.exp(second - top))
    assert streamed == pytest.approx(by_hand, abs=1e-6)


def test_a_sliding_window_that_counts_the_query_itself(backend):
    """W = 24 keys, the last of them the query's own, is window (23, 0) with causal order."""
    n, d, w = 100, 16, 24
    generator = torch.Generator().manual_seed(24)
    q, k, v = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in range(3))
    want = torch.stack([
        torch.softmax(k[max(0, i - w + 1) : i + 1] @ q[i] / math.sqrt(d), 0)
        @ v[max(0, i - w + 1) : i + 1]
        for i in range(n)
    ])  # fmt: skip
    spec = AttentionSpec(causal=True, window=(w - 1, 0))
    dtype, atol = (torch.float32, 1e-6) if backend == "triton" else (torch.float64, 1e-14)
    found = api.forward(q.to(dtype), k.to(dtype), v.to(dtype), spec=spec, backend=backend)
    torch.testing.assert_close(found.out.double(), want, rtol=0, atol=atol)

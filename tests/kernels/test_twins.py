"""Drop-in twins: torch's scaled_dot_product_attention, and flash-attn's functions."""

import inspect
import math

import pytest
import torch
from torch.nn import functional

from flashwire_kernels import (
    InvalidAttention,
    flash_attention,
    flash_attn_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def agree(ours, theirs, leaves):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(ours.sin().sum(), leaves),
        torch.autograd.grad(theirs.sin().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


class TestSdpa:
    @pytest.mark.parametrize(
        ("q", "k", "options"),
        [
            ((5, 4), (7, 4), {}),
            ((2, 5, 4), (2, 7, 4), {"is_causal": True}),
            ((2, 4, 7, 4), (2, 4, 5, 4), {"is_causal": True, "scale": 0.3}),
            ((2, 4, 5, 4), (2, 2, 7, 4), {"enable_gqa": True}),
            ((2, 4, 5, 4), (2, 1, 7, 4), {}),
            ((2, 4, 5, 4), (7, 4), {}),
            ((1, 4, 5, 4), (3, 4, 7, 4), {}),
            ((2, 3, 1, 4, 5, 4), (2, 3, 1, 4, 7, 4), {"is_causal": True}),
        ],
        ids=str,
    )
    def test_shapes(self, q, k, options):
        """Broadcasting included; causal is aligned top-left."""
        leaves = draw(*q), draw(*k, seed=1), draw(*k[:-1], 6, seed=2)
        agree(
            scaled_dot_product_attention(*leaves, **options),
            functional.scaled_dot_product_attention(*leaves, **options),
            leaves,
        )

    @pytest.mark.parametrize("shape", [(2, 4, 5, 4), (3, 1, 2, 4, 5, 4)])
    @pytest.mark.parametrize("of", [(5, 5), (1, 5), (2, 1, 5, 5)])
    def test_masks(self, shape, of):
        q, k, v = (draw(*shape, seed=n) for n in range(3))
        of = of[:1] if len(of) == 3 else of
        added = draw(*of, seed=4) if len(of) == 2 else draw(4, 1, 5, seed=4)
        boolean = added.detach() > 0
        boolean[..., 0] = True
        for mask, leaves in ((boolean, (q, k, v)), (added, (q, k, v, added))):
            agree(
                scaled_dot_product_attention(q, k, v, mask),
                functional.scaled_dot_product_attention(q, k, v, mask),
                leaves,
            )

    def test_a_query_that_sees_nothing(self):
        q = draw(1, 2, 3, 4)
        mask = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
        assert not scaled_dot_product_attention(q, q, q, mask)[:, :, 1].any()

    def test_dropout(self):
        q = draw(1, 2, 30, 4)
        torch.manual_seed(1)
        first = scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        torch.manual_seed(1)
        assert torch.equal(first, scaled_dot_product_attention(q, q, q, dropout_p=0.5))
        assert not torch.equal(first, scaled_dot_product_attention(q, q, q, dropout_p=0.5))

    def test_what_is_refused(self):
        q, k = draw(1, 4, 3, 4), draw(1, 2, 3, 4)
        mask = torch.ones(3, 3, dtype=torch.bool)
        for name, call in {
            "attn_mask: cannot be given with is_causal": lambda: scaled_dot_product_attention(
                q, q, q, mask, is_causal=True
            ),
            "attn_mask: must be boolean or floating": lambda: scaled_dot_product_attention(
                q, q, q, mask.int()
            ),
            "enable_gqa lets heads differ": lambda: scaled_dot_product_attention(q, k, k),
            "query: has 1 dimensions": lambda: scaled_dot_product_attention(q[0, 0, 0], k, k),
        }.items():
            with pytest.raises(InvalidAttention, match=name):
                call()

    def test_the_signature(self):
        """As torch documents it: functions in C have none to ask for."""
        shown = functional.scaled_dot_product_attention.__doc__.split("->")[0]
        for name in inspect.signature(scaled_dot_product_attention).parameters:
            assert name in shown


def materialised(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """flash-attn's definition for (L, H, D), after its documentation: (out, lse)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * (s / softcap).tanh()
    i = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0])
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()
    left, right = (math.inf if end == -1 else end for end in window)
    hidden = (j < i - left) | (j > i + (0 if causal else right))
    s = s.masked_fill(hidden, -math.inf)
    return torch.einsum("hij,jhd->ihd", s.softmax(-1), v), s.logsumexp(-1)


FLASH = [
    {},
    {"causal": True},
    {"window_size": (2, 0), "softmax_scale": 0.7},
    {"window_size": (3, -1), "causal": True, "softcap": 3.0},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 2.0, 1.0], dtype=torch.float64)},
]
NAMES = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}


def theirs(options):
    return {NAMES.get(name, name): value for name, value in options.items()}


class TestFlashAttn:
    @pytest.mark.parametrize("options", FLASH, ids=lambda options: "+".join(options) or "plain")
    def test_dense(self, options):
        leaves = draw(2, 5, 4, 8), draw(2, 7, 2, 8, seed=1), draw(2, 7, 2, 8, seed=2)
        out, lse, pattern = flash_attn_func(*leaves, **options, return_attn_probs=True)
        assert pattern is None
        wanted = [materialised(*row, **theirs(options)) for row in zip(*leaves, strict=True)]
        agree(
            torch.cat([out.flatten(), lse.flatten()]),
            torch.cat([torch.stack(part).flatten() for part in zip(*wanted, strict=True)]),
            leaves,
        )
        assert torch.equal(flash_attn_func(*leaves, **options, deterministic=True), out)

    @pytest.mark.parametrize("options", FLASH, ids=lambda options: "+".join(options) or "plain")
    def test_packed(self, options):
        leaves = draw(8, 4, 8), draw(9, 2, 8, seed=1), draw(9, 2, 8, seed=2)
        ends_q, ends_k = [0, 3, 8], [0, 5, 9]
        if "causal" in options or "window_size" in options:
            ends_q, ends_k = [0, 4, 8], [0, 5, 9]  # queries beyond the keys would see nothing
        offsets = [torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k)]
        arguments = (*leaves, *offsets, 5, 5)
        out, lse, _ = flash_attn_varlen_func(*arguments, **options, return_attn_probs=True)
        wanted = [
            materialised(
                leaves[0][ends_q[b] : ends_q[b + 1]],
                *(x[ends_k[b] : ends_k[b + 1]] for x in leaves[1:]),
                **theirs(options),
            )
            for b in range(2)
        ]
        agree(out, torch.cat([w[0] for w in wanted]), leaves)
        torch.testing.assert_close(lse, torch.cat([w[1] for w in wanted], 1))
        assert torch.equal(flash_attn_varlen_func(*arguments, **options), out)

    def test_what_is_refused(self):
        x, packed = draw(1, 4, 2, 8), draw(4, 2, 8)
        offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
        varlen = (packed, packed, packed, offsets, offsets)
        for name, call in {
            "return_attn_probs": lambda: flash_attn_func(
                x, x, x, dropout_p=0.5, return_attn_probs=True
            ),
            "deterministic": lambda: flash_attn_func(x, x, x, deterministic="no"),
            "block_table": lambda: flash_attn_varlen_func(*varlen, 3, 3, block_table=offsets),
            "max_seqlen_q: must be at least 3": lambda: flash_attn_varlen_func(*varlen, 2, 3),
            "max_seqlen_k: must be at least 3": lambda: flash_attn_varlen_func(*varlen, 3, 2),
            "window": lambda: flash_attn_func(x, x, x, window_size=(-2, 0)),
        }.items():
            with pytest.raises(InvalidAttention, match=name):
                call()

    def test_dropout(self):
        x = draw(1, 30, 2, 8)
        torch.manual_seed(2)
        out = flash_attn_func(x, x, x, 0.5)
        torch.manual_seed(2)
        assert torch.equal(out, flash_attention(x, x, x, dropout=0.5, layout="blhd"))

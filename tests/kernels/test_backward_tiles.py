"""The backward with tiles that are not square, come by pointers, or have dK and dV apart."""

import pytest

from flashwire_kernels.fused import config
from flashwire_kernels.testing import Case, make

CONFIGS = {
    "wide": config.Config(m=64, n=16),
    "tall": config.Config(m=16, n=64, descriptors=True),
    "apart": config.Config(m=32, n=32, descriptors=True, apart=True),
}


@pytest.fixture(params=CONFIGS)
def tiles(request, interpreted, monkeypatch):
    chosen = config.choose

    def choose(kind, *args, **kwargs):
        own = kind in ("keys", "queries")
        return CONFIGS[request.param] if own else chosen(kind, *args, **kwargs)

    monkeypatch.setattr(config, "choose", choose)


@pytest.mark.parametrize("options", [
    {"causal": True, "heads_q": 2, "sinks": True},
    {"window": (9, 30), "alibi": "bh", "softcap": 2.0, "dropout": 0.3},
    {"mask": "bhqk", "bias": "b11k", "causal": True, "causal_align": "top_left"},
], ids=str)  # fmt: skip
def test_tiles_of_other_shapes(options, tiles, assert_conforms):
    case = Case(len_q=70, len_k=83, dim=24, dim_v=40, dtype="bfloat16", poison=True, **options)
    assert_conforms(case, "triton")


def test_slopes_that_rise(tiles, assert_conforms):
    """Queries beyond the last one would have infinite p, were they not hidden."""
    call = make(Case(len_q=70, len_k=83, alibi="h", dtype="float32"))
    call.tensors["alibi_slopes"].fill_(-3.0)
    assert_conforms(call, "triton")

"""The input factories themselves: what they promise the suite that stands on them."""

import itertools

import pytest
import torch

from flashwire_kernels.testing import Case, make, pairwise


def test_pairwise_covers_every_pair_and_little_more():
    options = {"a": [0, 1, 2], "b": ["x", "y"], "c": [None, True], "d": list("pqrs")}
    rows = list(pairwise(options))
    for (a, a_values), (b, b_values) in itertools.combinations(options.items(), 2):
        seen = {(row[a], row[b]) for row in rows}
        assert seen == set(itertools.product(a_values, b_values))
    assert len(rows) <= 16  # 12 at least
    assert rows == list(pairwise(options))


def test_equal_cases_give_equal_bits():
    case = Case(mask="bhqk", bias="1hqk", alibi="bh", sinks=True, dropout=0.1)
    one, other = make(case), make(case)
    assert one.spec == other.spec
    assert all(torch.equal(t, other.tensors[name]) for name, t in one.tensors.items())
    assert not torch.equal(one.tensors["q"], make(Case(seed=1)).tensors["q"])


@pytest.mark.parametrize(("case", "shape", "lse_shape"), [
    (Case(), (2, 2, 24, 16), (2, 2, 24)),
    (Case(layout="blhd"), (2, 24, 2, 16), (2, 2, 24)),
    (Case(rank=3, batch=1), (2, 24, 16), (2, 24)),
    (Case(rank=3, batch=1, layout="blhd"), (24, 2, 16), (2, 24)),
    (Case(rank=2, batch=1, heads_q=1, heads_kv=1), (24, 16), (24,)),
    (Case(lens_q=(3, 0, 4), lens_k=(1, 2, 3), padding=5), (12, 2, 16), (12, 2)),
])  # fmt: skip
def test_shapes(case, shape, lse_shape):
    call = make(case)
    assert call.tensors["q"].shape == call.dout.shape == shape
    assert call.dlse.shape == lse_shape


def test_blind_rows_and_shapes_of_options():
    t = make(Case(mask="b1qk", bias="q1", alibi="bh", sinks=True, len_q=10, len_k=7)).tensors
    assert t["mask"].shape == (2, 1, 10, 7)
    assert not t["mask"][:, :, 3::5].any()
    assert t["mask"][:, :, 0].any()
    assert (t["bias"].shape, t["alibi_slopes"].shape, t["sinks"].shape) == ((10, 1), (2, 2), (2,))


def test_poison_lies_where_nothing_is_seen():
    keys = make(
        Case(causal=True, causal_align="top_left", len_q=4, len_k=6, bias="qk", poison=True)
    )
    t = keys.tensors
    assert t["k"][:, :, 4:].isnan().all()
    assert t["v"][:, :, 4:].isinf().all()
    assert t["bias"][0, 1:].isnan().all()
    assert t["q"].isfinite().all()
    queries = make(Case(causal=True, len_q=6, len_k=4, poison=True))
    assert queries.tensors["q"][:, :, :2].isinf().all()
    assert queries.dout[:, :, :2].isnan().all()
    assert queries.dlse[:, :, :2].isnan().all()
    for t in (queries.tensors["q"], queries.dout, queries.dlse):
        assert t[:, :, 2:].isfinite().all()
    sinks = make(Case(causal=True, len_q=6, len_k=4, sinks=True, poison=True))
    assert sinks.dlse[:, 0].isfinite().all()
    assert sinks.dlse[:, 1, :2].isnan().all()  # the last head has no sink
    packed = make(Case(lens_q=(2, 3), lens_k=(2, 3), padding=4, sinks=True, poison=True))
    for name in "qkv":
        assert not packed.tensors[name][5:].isfinite().any()
    assert packed.dlse[5:].isnan().all()

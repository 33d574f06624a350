"""resolve: every broken rule is named, with its field; what fits becomes a Problem."""

import pytest

from flashwire_kernels import support
from flashwire_kernels.errors import InvalidAttention
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import resolve

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 5, 7, 8, 9
DENSE = {"q": (B, HQ, LQ, D), "k": (B, HKV, LK, D), "v": (B, HKV, LK, DV)}
PACKED = {"q": (10, HQ, D), "k": (20, HKV, D), "v": (20, HKV, DV), "cu_seqlens_q": (3,),
          "cu_seqlens_k": (3,)}  # fmt: skip


def headers(shapes, **dtypes):
    usual = {"mask": "bool", "cu_seqlens_q": "int32", "cu_seqlens_k": "int64"}
    return {
        name: TensorHeader(dtypes.get(name, usual.get(name, "float32")), shape)
        for name, shape in shapes.items()
    }


def violations(shapes, spec=None, **dtypes):
    with pytest.raises(InvalidAttention) as caught:
        resolve(spec or AttentionSpec(), headers(shapes, **dtypes))
    return [(v.field, v.message) for v in caught.value.violations]


WRONG_SHAPES = [
    ({"k": (3, HKV, LK, D)}, "k", "batch must be q's (2), got 3"),
    ({"v": (3, HKV, LK, DV)}, "v", "batch must be q's (2), got 3"),
    ({"v": (B, HKV, 8, DV)}, "v", "length must be k's (7), got 8"),
    ({"v": (B, 2, LK, DV)}, "v", "heads must be k's (3), got 2"),
    ({"k": (B, HKV, LK, 4)}, "k", "head_dim must be q's (8), got 4"),
    ({"k": (B, 4, LK, D), "v": (B, 4, LK, DV)}, "k", "heads must divide q's (6), got 4"),
    ({"k": (B, 0, LK, D), "v": (B, 0, LK, DV)}, "k", "heads must divide q's (6), got 0"),
    ({"q": (B, HQ, LQ, 0), "k": (B, HKV, LK, 0)}, "q", "head_dim must be at least 1, got 0"),
    ({"v": (B, HKV, LK, 0)}, "v", "head_dim must be at least 1, got 0"),
    ({"q": (D,)}, "q", "must have rank 2, 3 or 4, got 1"),
    ({"q": (1, B, HQ, LQ, D)}, "q", "must have rank 2, 3 or 4, got 5"),
    ({"k": (HKV, LK, D)}, "k", "must have q's rank 4, got 3"),
    ({"mask": (LQ,)}, "mask", "must broadcast to [2, 6, 5, 7] (B, Hq, Lq, Lk), got [5]"),
    ({"mask": (1, B, HQ, LQ, LK)}, "mask", "must broadcast to [2, 6, 5, 7]"),
    ({"mask": (B, HKV, LQ, LK)}, "mask", "must broadcast to [2, 6, 5, 7]"),
    ({"mask": (0,)}, "mask", "must broadcast to [2, 6, 5, 7]"),
    ({"bias": (LQ, LQ)}, "bias", "must broadcast to [2, 6, 5, 7] (B, Hq, Lq, Lk), got [5, 5]"),
    ({"alibi_slopes": (B,)}, "alibi_slopes", "must have shape [6] or [2, 6], got [2]"),
    ({"alibi_slopes": (1, HQ)}, "alibi_slopes", "must have shape [6] or [2, 6], got [1, 6]"),
    ({"sinks": (HKV,)}, "sinks", "must have shape [6], got [3]"),
    ({"sinks": ()}, "sinks", "must have shape [6], got []"),
    ({"cu_seqlens_q": (3,)}, "cu_seqlens_k", "is missing: a packed request needs both offsets"),
    ({"keys": (3,)}, "keys", "is no tensor of attention"),
]


@pytest.mark.parametrize(("changed", "field", "message"), WRONG_SHAPES)
def test_each_shape_that_does_not_fit(changed, field, message):
    found = violations(DENSE | changed)
    assert any(named == field and message in text for named, text in found), found


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_missing_tensor(name):
    assert violations({n: s for n, s in DENSE.items() if n != name}) == [(name, "is missing")]


WRONG_DTYPES = [
    ({"q": "int64", "k": "int64", "v": "int64"}, "q", "dtype must be one of float16, bfloat16"),
    ({"k": "float16"}, "k", "dtype must be q's (float32), got float16"),
    ({"v": "float64"}, "v", "dtype must be q's (float32), got float64"),
    ({"mask": "uint8"}, "mask", "must be boolean (true = visible), got uint8"),
    ({"mask": "float32"}, "mask", "additive values go in bias"),
    ({"bias": "int32"}, "bias", "must be floating point, got int32"),
    ({"bias": "bool"}, "bias", "must be floating point, got bool"),
    ({"alibi_slopes": "int64"}, "alibi_slopes", "must be floating point, got int64"),
    ({"sinks": "bool"}, "sinks", "must be floating point, got bool"),
]


@pytest.mark.parametrize(("dtypes", "field", "message"), WRONG_DTYPES)
def test_each_dtype_that_does_not_fit(dtypes, field, message):
    extra = {"mask": (LK,), "bias": (LK,), "alibi_slopes": (HQ,), "sinks": (HQ,)}
    [(named, text)] = violations(DENSE | extra, **dtypes)
    assert named == field
    assert message in text


WRONG_PACKED = [
    ({"cu_seqlens_k": (4,)}, {}, "cu_seqlens_k", "has 4 offsets, cu_seqlens_q has 3"),
    ({"cu_seqlens_q": (0,)}, {}, "cu_seqlens_q", "must have shape [B+1], got [0]"),
    ({"cu_seqlens_q": (3, 1)}, {}, "cu_seqlens_q", "must have shape [B+1], got [3, 1]"),
    ({"v": (21, HKV, DV)}, {}, "v", "number of tokens must be k's (20), got 21"),
    ({"q": (1, HQ, 10, D)}, {}, "q", "packed tensors have rank 3 (T, H, D), got 4"),
    ({"alibi_slopes": (3, HQ)}, {}, "alibi_slopes", "must have shape [6] or [2, 6], got [3, 6]"),
    ({}, {"cu_seqlens_q": "float32"}, "cu_seqlens_q", "must be int32 or int64, got float32"),
    ({}, {"cu_seqlens_k": "bool"}, "cu_seqlens_k", "must be int32 or int64, got bool"),
]


@pytest.mark.parametrize(("changed", "dtypes", "field", "message"), WRONG_PACKED)
def test_each_way_in_which_packing_does_not_fit(changed, dtypes, field, message):
    [(named, text)] = violations(PACKED | changed, **dtypes)
    assert named == field
    assert message in text


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_packed_tensors_have_no_layout(layout):
    [(named, text)] = violations(PACKED, AttentionSpec(layout=layout))
    assert named == "layout"
    assert "layout must be absent" in text


WRONG_OFFSETS = [
    ([1, 5, 10], [0, 9, 20], "cu_seqlens_q", "must start at 0, got 1"),
    ([0, 5, 4], [0, 9, 20], "cu_seqlens_q", "must not decrease, but [2] = 4 < [1] = 5"),
    ([0, 5, 11], [0, 9, 20], "cu_seqlens_q", "ends at 11, beyond the 10 packed rows"),
    ([0, 5, 10], [0, 9, 21], "cu_seqlens_k", "ends at 21, beyond the 20 packed rows"),
    ([0, -3, 10], [0, 9, 20], "cu_seqlens_q", "must not decrease, but [1] = -3 < [0] = 0"),
]


@pytest.mark.parametrize(("offsets_q", "offsets_k", "field", "message"), WRONG_OFFSETS)
def test_each_wrong_value_of_offsets(offsets_q, offsets_k, field, message):
    problem = resolve(AttentionSpec(), headers(PACKED))
    with pytest.raises(InvalidAttention) as caught:
        problem.with_offsets(offsets_q, offsets_k)
    assert [(v.field, v.message) for v in caught.value.violations] == [(field, message)]


def test_a_packed_mask_broadcasts_to_the_longest_sequences():
    shapes = PACKED | {"mask": (2, 1, 6, 11), "bias": (6, 11)}
    problem = resolve(AttentionSpec(), headers(shapes)).with_offsets([0, 4, 10], [0, 9, 20])
    assert (problem.len_q, problem.len_k) == (6, 11)
    with pytest.raises(InvalidAttention) as caught:
        resolve(AttentionSpec(), headers(shapes)).with_offsets([0, 5, 10], [0, 9, 20])
    assert [v.field for v in caught.value.violations] == ["mask", "bias"]


def test_every_violation_at_once():
    shapes = DENSE | {"mask": (4,), "bias": (3,), "alibi_slopes": (1,), "sinks": (1,)}
    found = violations(shapes, mask="float32", bias="int32", k="float64")
    assert [field for field, _ in found] == [
        "k",
        "bias",
        "mask",
        "alibi_slopes",
        "sinks",
        "mask",
        "bias",
    ]


@pytest.mark.parametrize(("shapes", "layout", "sizes"), [
    (DENSE, None, (B, HQ, HKV, LQ, LK)),
    ({n: (s[0], s[2], s[1], s[3]) for n, s in DENSE.items()}, "blhd", (B, HQ, HKV, LQ, LK)),
    ({n: s[1:] for n, s in DENSE.items()}, "bhld", (1, HQ, HKV, LQ, LK)),
    ({n: (s[2], s[1], s[3]) for n, s in DENSE.items()}, "blhd", (1, HQ, HKV, LQ, LK)),
    ({n: s[2:] for n, s in DENSE.items()}, None, (1, 1, 1, LQ, LK)),
    ({n: s[2:] for n, s in DENSE.items()}, "blhd", (1, 1, 1, LQ, LK)),
])  # fmt: skip
def test_dense_problems(shapes, layout, sizes):
    p = resolve(AttentionSpec(layout=layout), headers(shapes))
    assert (p.batch, p.heads_q, p.heads_kv, p.len_q, p.len_k) == sizes
    assert (p.dim, p.dim_v, p.rank, p.packed) == (D, DV, len(shapes["q"]), False)
    assert p.lengths == {(LQ, LK): sizes[0]}
    assert (p.tokens_q, p.tokens_k) == (sizes[0] * LQ, sizes[0] * LK)


def test_packed_problems():
    p = resolve(AttentionSpec(), headers(PACKED))
    assert (p.packed, p.batch, p.len_q, p.tokens_q, p.tokens_k, p.sequences) == (
        True, 2, 0, 10, 20, [])  # fmt: skip
    known = p.with_offsets([0, 4, 4], [0, 9, 20])
    assert known.sequences == [(4, 9), (0, 11)]
    assert (known.len_q, known.len_k) == (4, 11)


@pytest.mark.parametrize("shape", [(), (1,), (LK,), (1, LK), (LQ, 1), (HQ, 1, 1), (B, 1, 1, LK),
                                   (1, 1, 1, 1), (B, HQ, LQ, LK)])  # fmt: skip
def test_broadcast_shapes(shape):
    problem = resolve(AttentionSpec(), headers(DENSE | {"mask": shape, "bias": shape}))
    assert problem.mask == TensorHeader("bool", shape)
    assert problem.bias == TensorHeader("float32", shape)


def test_a_broadcast_of_zero_queries():
    shapes = {"q": (B, HQ, 0, D), "k": DENSE["k"], "v": DENSE["v"]}
    for shape in ((B, HQ, 0, LK), (1, 1, 1, LK), (0, 1)):
        assert resolve(AttentionSpec(), headers(shapes | {"mask": shape})).len_q == 0


def test_derived_values():
    p = resolve(AttentionSpec(), headers(DENSE))
    assert p.scale == 8**-0.5
    assert (p.group, p.lse_dtype) == (2, "float32")
    assert resolve(AttentionSpec(scale=0), headers(DENSE)).scale == 0.0
    wide = headers(DENSE, q="float64", k="float64", v="float64")
    assert resolve(AttentionSpec(), wide).lse_dtype == "float64"
    no_heads = {"q": (B, 0, LQ, D), "k": (B, 0, LK, D), "v": (B, 0, LK, DV)}
    assert resolve(AttentionSpec(), headers(no_heads)).group == 1


@pytest.mark.parametrize(
    "shape", [(0, 2**31, 1, 1), (0, 2**62, 2**62, 1), (0, 2**20, 2**20, 2**20)]
)
def test_sizes_that_only_a_zero_makes_small(shape):
    with pytest.raises(InvalidAttention) as caught:
        resolve(AttentionSpec(), {name: TensorHeader("float32", shape) for name in "qkv"})
    assert {v.field for v in caught.value.violations} == {"q", "k", "v"}


def test_many_empty_batch_rows_cost_nothing():
    headers = {name: TensorHeader("float32", (2**31 - 1, 1, 0, 2)) for name in "qkv"}
    problem = resolve(AttentionSpec(), headers)
    assert problem.lengths == {(0, 0): 2**31 - 1}
    assert support.extra_bytes("reference", problem, backward=True) == 0

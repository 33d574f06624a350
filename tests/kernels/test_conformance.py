"""One suite for every backend: each result and gradient within the contract's error budget.

The grids are those that the public libraries test on, and what they leave out.
"""

import dataclasses
import math

import pytest
import torch

from flashwire_kernels.testing import Case, make, pairwise

DTYPES = ("float16", "bfloat16", "float32", "float64")
BROADCASTS = ("bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "11qk", "b11k", "1hq1", "hqk", "qk", "q1",
              "k", "1111", "1", "")  # fmt: skip
LENGTHS = [(113, 203), (128, 217), (113, 211), (108, 256), (1, 239), (239, 1), (3, 799), (799, 3),
           (127, 513), (513, 127), (1, 1), (64, 1), (1, 64)]  # fmt: skip
LONG_LENGTHS = [(256, 512), (512, 256), (640, 128), (1023, 1024), (1024, 1023), (2048, 2048)]
DIMS = (1, 3, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
WINDOWS = [None, (0, 0), (5, 0), (0, 5), (3, 7), (None, 4), (4, None), (1000, 1000), (2**62, 2**62)]


def cases(*many, **common):
    """Parametrise over cases, with their differences as ids."""
    return pytest.mark.parametrize(
        "case", [dataclasses.replace(case, **common) for case in many], ids=str
    )


def lengths(pairs, **common):
    return cases(*(Case(len_q=q, len_k=k, batch=1) for q, k in pairs), **common)


@lengths(LENGTHS)
def test_lengths(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@lengths(LENGTHS, causal=True, dtype="bfloat16", poison=True)
def test_causal_lengths(case, align, fast_backend, assert_conforms):
    assert_conforms(dataclasses.replace(case, causal_align=align), fast_backend)


@lengths([(1023, 1024)], causal=True, window=(200, 0))
def test_a_long_sequence(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [None, (100, 50)])
@pytest.mark.parametrize("causal", [False, True])
@lengths(LONG_LENGTHS, dim=64)
def test_long_lengths(case, causal, window, dtype, fast_backend, assert_conforms):
    case = dataclasses.replace(case, causal=causal, window=window, dtype=dtype)
    assert_conforms(case, fast_backend)


@pytest.mark.long
@lengths([(16, 100_000), (1, 100_000)], heads_q=6, heads_kv=2, dim=64)
def test_very_many_keys(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


@cases(*(Case(dim=d, len_q=37, len_k=45, dtype=t) for d in DIMS for t in ("float32", "bfloat16")))
def test_head_dims(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


@cases(*(Case(dim=d, dim_v=dv, len_q=37, len_k=45, causal=True)
         for d, dv in [(16, 1), (1, 16), (192, 128), (59, 111), (64, 512), (300, 8)]))  # fmt: skip
def test_value_dims_of_their_own(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


@pytest.mark.parametrize("form", [{}, {"lens_q": (5, 0, 30), "lens_k": (9, 4, 30)}])
@cases(*(Case(heads_q=6, heads_kv=h, len_q=40, len_k=50) for h in (6, 3, 2, 1)),
       causal=True, dtype="bfloat16", sinks=True, mask="1hqk")  # fmt: skip
def test_shared_heads(case, form, fast_backend, assert_conforms):
    assert_conforms(dataclasses.replace(case, **form), fast_backend)


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@lengths([(40, 40), (70, 25), (25, 70)], alibi="h", poison=True)
def test_windows(case, window, causal, align, fast_backend, assert_conforms):
    case = dataclasses.replace(case, window=window, causal=causal, causal_align=align)
    assert_conforms(case, fast_backend)


@cases(*(Case(mask=m, blind_rows=b, poison=True) for m in BROADCASTS for b in (True, False)),
       len_q=30, len_k=21)  # fmt: skip
def test_masks_of_every_broadcast_shape(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


@pytest.mark.parametrize("form", [{}, {"lens_q": (5, 0, 21), "lens_k": (9, 4, 30), "padding": 3}])
@cases(*(Case(bias=b) for b in BROADCASTS), len_q=21, len_k=30, causal=True, poison=True)
def test_bias_and_its_gradient_in_every_broadcast_shape(case, form, fast_backend, assert_conforms):
    assert_conforms(dataclasses.replace(case, **form), fast_backend)


@cases(*(Case(dtype=t, bias_dtype=b, bias="1hqk") for t in DTYPES for b in DTYPES))
def test_bias_in_any_dtype(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


@pytest.mark.parametrize("value", [-1.0, 1.0])
@pytest.mark.parametrize("dtype", [t for t in DTYPES if t != "float64"])
@cases(Case(bias="1hqk"), Case(bias="qk", sinks=True, alibi="h"), Case(bias="1hqk", len_q=3),
       dlse=False, len_q=20, len_k=150)  # fmt: skip
def test_a_bias_as_large_as_floats_go(case, dtype, value, fast_backend, assert_conforms):
    call = make(dataclasses.replace(case, dtype=dtype))
    bias = call.tensors["bias"].clamp_(min=-5)
    value *= torch.finfo(bias.dtype).max
    bias[..., 1, :] = value
    bias[..., 2, :70] = value
    assert_conforms(call, fast_backend)


@pytest.mark.parametrize("dtype", DTYPES)
@cases(Case(softcap=1.5), Case(alibi="h"), Case(alibi="bh"), Case(sinks=True), Case(scale=0.0),
       Case(scale=-0.7), Case(scale=3.0), Case(dropout=0.1), Case(dropout=0.9), Case(dlse=False),
       Case(sinks=True, mask="bhqk", poison=True), Case(mask="k", bias="k"),
       len_q=50, len_k=70)  # fmt: skip
def test_options_alone(case, dtype, fast_backend, assert_conforms):
    assert_conforms(dataclasses.replace(case, dtype=dtype), fast_backend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.7, 1e-60, -1e-60])
@lengths([(20, 20), (9, 40), (40, 9)], poison=True)
def test_hidden_stays_hidden_whatever_the_scale(case, scale, causal, backend, assert_conforms):
    assert_conforms(dataclasses.replace(case, scale=scale, causal=causal), backend)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("holder", ["q", "k", "v", "bias", "sinks", "dout", "dlse"])
@cases(Case(), Case(causal=True), Case(mask="bhqk", softcap=2.0), heads_q=4, len_q=20, len_k=20)
def test_what_sees_a_nan_is_not_finite(case, holder, value, backend, assert_conforms):
    options = {"bias": {"bias": "1hqk"}, "sinks": {"sinks": True}}.get(holder, {})
    call = make(dataclasses.replace(case, **options))
    tensor = call.tensors[holder] if holder in call.tensors else getattr(call, holder)
    entry = {"bias": (0, 2, 11, 7), "sinks": (1,), "dlse": (1, 0, 11)}.get(holder, (1, 1, 11, 5))
    tensor[entry] = value
    assert_conforms(call, backend)


FORMS = {
    "bhld": {},
    "blhd": {"layout": "blhd"},
    "named bhld": {"layout": "bhld"},
    "rank 3": {"rank": 3, "batch": 1},
    "rank 3 blhd": {"rank": 3, "batch": 1, "layout": "blhd"},
    "packed": {"lens_q": (7, 0, 1, 25), "lens_k": (7, 4, 0, 31)},
    "packed with padding": {"lens_q": (9, 20), "lens_k": (30, 1), "padding": 5},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms(form, dtype, causal, backend, assert_conforms):
    case = Case(heads_q=4, len_q=20, len_k=27, causal=causal, dtype=dtype, poison=True, **form)
    assert_conforms(case, backend)


@pytest.mark.parametrize("layout", [None, "bhld", "blhd"])
def test_rank_2(layout, backend, assert_conforms):
    one = {"batch": 1, "heads_q": 1, "heads_kv": 1, "rank": 2, "layout": layout}
    assert_conforms(Case(**one, len_q=20, len_k=27, causal=True, mask="qk"), backend)


@cases(Case(batch=0), Case(len_q=0), Case(len_k=0), Case(len_q=0, len_k=0),
       Case(heads_q=0, heads_kv=0), Case(heads_q=0, heads_kv=2), Case(lens_q=(), lens_k=()),
       Case(lens_q=(), lens_k=(), padding=3), Case(lens_q=(0, 0), lens_k=(0, 4)),
       Case(lens_q=(3, 2), lens_k=(0, 0), sinks=True),
       Case(len_k=0, sinks=True, dropout=0.5, alibi="bh", mask="bhqk", bias="1hq1",
            causal=True))  # fmt: skip
def test_nothing_to_do(case, backend, assert_conforms):
    assert_conforms(case, backend)


GRID = {
    "form": list(FORMS.values()),
    "heads": [(2, 2), (6, 2), (6, 1)],
    "dims": [(16, None), (40, None), (59, 24)],
    "dtype": list(DTYPES),
    "causal": [False, True],
    "causal_align": ["bottom_right", "top_left"],
    "window": [None, (6, 0), (None, 3), (2, None), (4, 9)],
    "softcap": [None, 2.0],
    "scale": [None, -0.4],
    "dropout": [0.0, 0.3],
    "alibi": [None, "h", "bh"],
    "sinks": [False, True],
    "mask": [None, "b1qk", "k", "1hq1"],
    "bias": [None, "1hqk", "b11k", "q1"],
    "dlse": [True, False],
    "poison": [True, False],
}


def grid_case(seed, form, heads, dims, **options):
    return Case(
        **{"len_q": 45, "len_k": 33} | form,
        heads_q=heads[0],
        heads_kv=heads[1],
        dim=dims[0],
        dim_v=dims[1],
        seed=seed,
        **options,
    )


@cases(*(grid_case(seed, **row) for seed, row in enumerate(pairwise(GRID))))
def test_every_pair_of_options(case, backend, assert_conforms):
    assert_conforms(case, backend)


@pytest.mark.long
@cases(*(grid_case(seed, **row) for seed, row in enumerate(pairwise(GRID))), len_q=300, len_k=211)
def test_every_pair_of_options_over_many_tiles(case, fast_backend, assert_conforms):
    assert_conforms(case, fast_backend)


EVERYTHING = {
    "heads_q": 6,
    "heads_kv": 2,
    "dim": 24,
    "dim_v": 40,
    "causal": True,
    "window": (60, 0),
    "softcap": 2.5,
    "alibi": "bh",
    "sinks": True,
    "mask": "b1qk",
    "bias": "1hqk",
    "dropout": 0.2,
    "poison": True,
}
PACKED = {"lens_q": (70, 0, 1, 130, 5), "lens_k": (90, 4, 0, 130, 200), "padding": 7}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [{"len_q": 150, "len_k": 170}, PACKED], ids=["dense", "packed"])
def test_everything_at_once(form, dtype, backend, assert_conforms):
    assert_conforms(Case(**EVERYTHING, **form, dtype=dtype), backend)

"""What is particular to the triton backend: its kernels interpreted, and its choices."""

import itertools
import math

import pytest

from flashwire_kernels import api
from flashwire_kernels.errors import UnsupportedBackend
from flashwire_kernels.fused import support as fused_support
from flashwire_kernels.testing import Case, make
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import resolve


@pytest.mark.parametrize("fast_backend", ["triton"], indirect=True)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [
    {"len_q": 70, "len_k": 150}, {"lens_q": (70, 3, 65), "lens_k": (70, 0, 130)}],
    ids=str)  # fmt: skip
def test_infinite_keys_that_were_counted(form, value, fast_backend, monkeypatch, assert_conforms):
    monkeypatch.setattr("flashwire_kernels.fused.infinite.COUNT_FROM", 1)
    call = make(Case(**form, causal=True, poison=True))
    key = (1, 1, 3, 5) if "len_q" in form else (100, 1, 5)
    call.tensors["k"][key] = value
    assert_conforms(call, fast_backend)


@pytest.mark.parametrize("fast_backend", ["triton"], indirect=True)
@pytest.mark.parametrize("options", [
    {}, {"causal": True, "sinks": True}, {"window": (50, 9), "alibi": "bh", "softcap": 3.0},
    {"mask": "bhqk", "bias": "1hqk", "dropout": 0.3, "poison": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("form", [
    {"len_q": 3, "len_k": 200}, {"lens_q": (2, 0, 1, 5), "lens_k": (130, 70, 0, 3), "padding": 2},
], ids=str)  # fmt: skip
def test_few_queries_share_out_their_keys(form, options, fast_backend, assert_conforms):
    case = Case(**form, **options, heads_q=6, heads_kv=2, dtype="bfloat16")
    assert_conforms(case, fast_backend)


@pytest.mark.parametrize("fast_backend", ["triton"], indirect=True)
@pytest.mark.parametrize("len_q", [3, 20])
def test_sinks_of_any_stride(len_q, fast_backend, assert_conforms):
    call = make(Case(len_q=len_q, len_k=70, heads_q=4, sinks=True))
    call.tensors["sinks"] = call.tensors["sinks"][:, None].expand(4, 3).contiguous()[:, 1]
    assert call.tensors["sinks"].stride() == (3,)
    assert_conforms(call, fast_backend)


@pytest.mark.parametrize("fast_backend", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"), [(192, 128, "bfloat16"), (16, 128, "float32"), (256, 64, "float16")]
)
def test_a_gradient_of_every_pair_with_values_of_another_size(
    dim, dim_v, dtype, fast_backend, assert_conforms
):
    assert_conforms(
        Case(dim=dim, dim_v=dim_v, dtype=dtype, bias="1hqk", len_q=70, causal=True), fast_backend
    )


def packed(lens_q, lens_k, heads_q, heads_kv):
    """A problem of shapes alone: so many heads of so many sequences."""
    total_q, total_k = (sum(lens) for lens in (lens_q, lens_k))
    headers = {
        "q": TensorHeader("float16", (total_q, heads_q, 16)),
        "k": TensorHeader("float16", (total_k, heads_kv, 16)),
        "v": TensorHeader("float16", (total_k, heads_kv, 16)),
    } | {
        name: TensorHeader("int64", (len(lens_q) + 1,)) for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    offsets = ([0, *itertools.accumulate(lens)] for lens in (lens_q, lens_k))
    return resolve(AttentionSpec(), headers).with_offsets(*offsets)


@pytest.mark.parametrize(
    "problem",
    [
        packed([*[0] * 2**14, 1], [*[0] * 2**14, 2**25], 1, 1),
        packed([*[0] * 2**19, 64], [*[0] * 2**19, 1024], 2**6, 2**6),
    ],
    ids=["parts of keys", "rows"],
)
def test_programs_for_empty_sequences_count(problem):
    reasons = fused_support.reasons(problem, "cuda")
    assert [r for r in reasons if "programs" in r]


def test_every_reason_is_named():
    call = make(Case(dim=300, dim_v=400, dtype="float64"))
    with pytest.raises(UnsupportedBackend) as refused:
        api.forward(**call.tensors, backend="triton")
    text = str(refused.value)
    assert all(part in text for part in ("'cpu'", "float64", "300", "400", "256"))


def test_auto_does_not_interpret():
    call = make(Case())
    assert api.forward(**call.tensors, spec=AttentionSpec()).backend == "cpu"

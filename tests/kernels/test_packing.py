"""Several attentions computed as one packed problem: each has the bits that it has alone."""

import dataclasses
import math

import pytest
import torch

from flashwire_kernels import api, company
from flashwire_kernels.errors import InvalidAttention
from flashwire_kernels.packing import Packing, Saved
from flashwire_kernels.testing import Case, make

OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "dtype": "bfloat16"},
    "window": {"window": (20, 3), "dtype": "float16"},
    "softcap": {"softcap": 2.0, "causal": True, "alibi": "h"},
    "alibi": {"alibi": "bh", "causal_align": "top_left", "window": (9, 0)},
    "double": {"dtype": "float64", "causal": True},
    "one head": {"heads_q": 1, "heads_kv": 1, "causal": True},
    "many heads": {"heads_q": 8, "heads_kv": 2, "dim": 72, "dim_v": 64},
}
SIZES = (
    {"batch": 1, "len_q": 33, "len_k": 33},
    {"batch": 2, "len_q": 33, "len_k": 33, "layout": "blhd"},
    {"batch": 1, "len_q": 70, "len_k": 91},
    {"lens_q": (33, 17, 0, 5), "lens_k": (33, 40, 3, 1)},
    {"batch": 3, "len_q": 9, "len_k": 2},
    {"batch": 1, "len_q": 33, "len_k": 33},
)


def calls_of(cases):
    """(Call, its tensors and options) of some cases."""
    made = [make(case) for case in cases]
    return [(_call(m), m) for m in made]


def _call(m):
    tensors = {n: t for n, t in m.tensors.items() if not n.startswith("cu_")}
    offsets = {n: t for n, t in m.tensors.items() if n.startswith("cu_")}
    return api.Call.of(m.spec, tensors, offsets)


def assert_bits(got, want):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.contiguous().view(whole), want.contiguous().view(whole))


def packed_alone(call, backend):
    found = Packing.of([call], backend)
    assert found is not None
    return found


def check_forward(both, backend):
    """Together, and alone: as the backend computes it, or packed where that has other bits."""
    together = Packing.of([call for call, _ in both], backend)
    assert together is not None
    for (call, m), (out, lse) in zip(both, together.forward(), strict=True):
        alone = api.forward(**m.tensors, spec=m.spec, backend=backend)
        want = alone.out, alone.lse
        if backend not in company.SAME_BITS_DENSE:
            want = packed_alone(call, backend).forward()[0]
            torch.testing.assert_close(want[0], alone.out, rtol=2e-2, atol=2e-2)
        assert_bits(out, want[0])
        assert_bits(lse, want[1])


def check_backward(both, backend, *, recomputed, dlse):
    saved = []
    for _, m in both:
        f = api.forward(**m.tensors, spec=m.spec, backend=backend)
        given = {} if recomputed else {"out": f.out, "lse": f.lse}
        saved.append(Saved(dout=m.dout, dlse=m.dlse if dlse else None, **given))
    together = Packing.of([call for call, _ in both], backend)
    found = together.backward(saved)
    for (call, m), own, got in zip(both, saved, found, strict=True):
        if backend in company.SAME_BITS_DENSE:
            rest = {n: getattr(own, n) for n in ("out", "lse", "dlse")}
            want = api.backward(
                own.dout, **m.tensors, **rest, spec=m.spec, backend=backend
            ).gradients
        else:
            want = packed_alone(call, backend).backward([own])[0]
        for name in ("dq", "dk", "dv"):
            assert_bits(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("options", OPTIONS)
def test_in_company_as_alone(options):
    more = {"heads_q": 4, "heads_kv": 2, "dim": 40, **OPTIONS[options]}
    both = calls_of([Case(**more, **size) for size in SIZES])
    check_forward(both, "cpu")
    for recomputed, dlse in ((False, False), (True, True)):
        check_backward(both, "cpu", recomputed=recomputed, dlse=dlse)


WAYS = {
    "tiles": ({"batch": 1, "len_q": 70, "len_k": 40}, {"lens_q": (80, 5), "lens_k": (3, 60)}),
    "decode": ({"batch": 2, "len_q": 5, "len_k": 70}, {"lens_q": (8, 1), "lens_k": (9, 90)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_in_company_as_alone_by_triton(way, interpreted):
    both = calls_of([Case(heads_q=2, heads_kv=1, dim=16, causal=True, **s) for s in WAYS[way]])
    check_forward(both, interpreted)
    if way == "tiles":
        check_backward(both, interpreted, recomputed=False, dlse=True)


PLAIN = {"heads_q": 4, "heads_kv": 2, "len_q": 20, "len_k": 30, "dim": 16}
UNLIKE = (
    {"dtype": "bfloat16"}, {"heads_q": 2}, {"heads_kv": 4}, {"dim": 24}, {"dim_v": 8},
    {"causal": True}, {"softcap": 1.0}, {"scale": 0.3}, {"alibi": "h"}, {"window": (3, 3)},
)  # fmt: skip
ALONE = (
    {"dropout": 0.1}, {"mask": "b1qk"}, {"bias": "1hqk"}, {"sinks": True}, {"len_q": 0},
    {"len_k": 0}, {"batch": 0}, {"lens_q": (3, 2), "lens_k": (3, 2), "padding": 1},
)  # fmt: skip


def test_only_what_agrees_is_computed_together():
    def kind(**fields):
        return company.kind(calls_of([Case(**PLAIN | fields)])[0][0].problem, "cpu")

    plain = kind()
    assert plain is not None
    assert kind(len_q=3, batch=7, layout="blhd") == plain
    assert kind(lens_q=(3, 2), lens_k=(30, 0)) == plain
    assert len({plain, *(kind(**fields) for fields in UNLIKE)}) == 1 + len(UNLIKE)
    assert [kind(**fields) for fields in ALONE] == [None] * len(ALONE)
    problem = calls_of([Case(**PLAIN)])[0][0].problem
    assert company.kind(problem, "reference") is None


def test_by_triton_those_that_run_the_same_kernels_alone():
    def kind(len_q, len_k):
        case = Case(**PLAIN | {"len_q": len_q, "len_k": len_k})
        return company.kind(calls_of([case])[0][0].problem, "triton")

    few = kind(17, 9000)  # 34 rows of a key head, on as many splits as there may be
    assert few == kind(32, 8000)
    others = {kind(16, 9000), kind(17, 40), kind(33, 9000), kind(1024, 9000)}
    assert len(others - {few}) == 4
    assert kind(33, 3) == kind(1000, 9000)
    unlike = calls_of([Case(**PLAIN | {"len_q": n}) for n in (2, 20)])
    assert Packing.of([call for call, _ in unlike], "triton") is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e20])
def test_what_the_cpu_backend_must_take_care_of_is_left_alone(value):
    """It takes care of all sequences of that length, with other bits than without care."""
    both = calls_of([Case(**PLAIN), Case(**PLAIN)])
    assert Packing.of([call for call, _ in both], "cpu") is not None
    for name in "qk":
        spoiled, _ = calls_of([Case(**PLAIN)])[0]
        t = getattr(spoiled.inputs, name).clone()
        t[0, 1, 2, 3] = value
        spoiled = dataclasses.replace(
            spoiled, inputs=dataclasses.replace(spoiled.inputs, **{name: t})
        )
        assert Packing.of([both[0][0], spoiled], "cpu") is None


def test_a_nan_in_v_is_its_owners_alone():
    both = calls_of([Case(**PLAIN), Case(**PLAIN)])
    both[1][1].tensors["v"][0, 0, 0] = math.nan
    check_forward(both, "cpu")


def test_what_does_not_fit_is_refused():
    ((call, m),) = calls_of([Case(**PLAIN)])
    together = Packing.of([call], "cpu")
    with pytest.raises(InvalidAttention, match="dout"):
        together.backward([Saved(dout=m.dout[:, :, 1:])])
    with pytest.raises(InvalidAttention, match="lse: is missing"):
        together.backward([Saved(dout=m.dout, out=m.dout)])

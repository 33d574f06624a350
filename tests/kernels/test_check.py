"""check: what passes, what does not, and what is refused."""

import math

import pytest
import torch

from flashwire_kernels import api, support
from flashwire_kernels.check import check, compare
from flashwire_kernels.errors import InvalidAttention, NotEnoughMemory
from flashwire_kernels.testing import Case, make

INF, NAN = math.inf, math.nan


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def run(call, **arguments):
    return check(**call.tensors, spec=call.spec, **arguments)


def own_results(call, **options):
    f = api.forward(**call.tensors, spec=call.spec)
    g = api.backward(call.dout, **call.tensors, out=f.out, lse=f.lse, spec=call.spec).gradients
    return {"out": f.out, "lse": f.lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}


def test_compare_finds_the_worst_entry():
    found = compare(tensor(1, 2.5, 3).reshape(1, 3), tensor(1, 2, 4).reshape(1, 3), budget=0.75)
    assert (found.max_abs, found.rel, found.passed) == (1.0, 0.25, False)
    assert (found.worst.index, found.worst.got, found.worst.want) == ((0, 2), 3.0, 4.0)
    assert compare(tensor(1, 2.5), tensor(1, 2), budget=0.5).passed


@pytest.mark.parametrize(("got", "want", "passes"), [
    (NAN, NAN, True), (INF, NAN, True), (-INF, NAN, True), (NAN, INF, True), (-INF, INF, True),
    (0.0, NAN, False), (NAN, 0.0, False), (INF, 0.0, False), (0.0, -INF, False),
    (-INF, -INF, True), (NAN, -INF, False), (INF, -INF, False)])  # fmt: skip
def test_finite_meets_finite(got, want, passes):
    found = compare(tensor(1, got), tensor(1, want, dtype=torch.float64), budget=0.1)
    assert found.passed == passes
    assert found.max_abs == (0.0 if passes else INF)
    assert found.rel == found.max_abs


def test_what_a_dtype_cannot_hold_is_not_finite():
    want = tensor(1e5, -1e5, dtype=torch.float64)
    assert compare(tensor(INF, -INF, dtype=torch.float16), want, budget=1).passed
    assert not compare(tensor(65504, -INF, dtype=torch.float16), want, budget=1).passed
    assert not compare(tensor(INF, -1e5), want, budget=1).passed


def test_what_is_not_promised_is_not_compared():
    promised = torch.tensor([True, False])
    assert compare(tensor(1, NAN), tensor(1, 2), 0.0, promised).passed
    assert not compare(tensor(NAN, 1), tensor(1, 2), 0.0, promised).passed


def test_nothing_to_compare():
    found = compare(torch.ones(0, 3), torch.ones(0, 3), budget=0.0)
    assert (found.passed, found.max_abs, found.worst) == (True, 0.0, None)
    same = compare(torch.zeros(2), torch.zeros(2), budget=0.0)
    assert (same.passed, same.rel) == (True, 0.0)


def test_by_default_the_fastest_meets_the_reference():
    call = make(Case(bias="1hqk", sinks=True))
    report = run(call)
    assert report.passed
    assert list(report.tensors) == ["out", "lse"]
    assert report.got == next(b for b in support.BACKENDS if b != "triton")
    assert report.want == "reference"
    assert [s.backend for s in report.skipped] == ["triton"]
    with_gradients = run(call, dout=call.dout, dlse=call.dlse)
    assert list(with_gradients.tensors) == ["out", "lse", "dq", "dk", "dv", "dbias", "dsinks"]
    assert with_gradients.passed


def test_two_rounded_sides_have_twice_the_budget():
    call = make(Case())
    one, two = run(call).tensors["out"], run(call, backends=("cpu", "cpu")).tensors["out"]
    assert two.budget == 2 * one.budget
    assert (two.max_abs, one.passed) == (0.0, True)
    assert run(call, backends=("reference", "cpu")).tensors["out"].budget == one.budget


@pytest.mark.parametrize("case", [
    Case(layout="blhd"), Case(batch=1, rank=3, layout="blhd"), Case(lens_q=(3, 4), lens_k=(5, 6)),
    Case(batch=1, heads_q=1, heads_kv=1, rank=2)], ids=str)  # fmt: skip
def test_mine_in_the_callers_layout(case):
    call = make(case)
    mine = own_results(call)
    assert run(call, dout=call.dout, mine=mine).passed
    wrong = mine["dk"].clone()
    index = tuple(size - 1 for size in wrong.shape)
    wrong[index] += 1
    report = run(call, dout=call.dout, mine=mine | {"dk": wrong})
    assert not report.passed
    assert [name for name, c in report.tensors.items() if not c.passed] == ["dk"]
    assert report.got == "mine"
    found = report.tensors["dk"]
    assert found.worst.index == index
    assert found.worst.got == pytest.approx(found.worst.want + 1, abs=1e-5)


def test_mine_may_hold_some_results_in_another_dtype():
    call = make(Case(dtype="bfloat16"))
    mine = {"out": own_results(call)["out"].double()}
    assert list(run(call, mine=mine).tensors) == ["out"]


WRONG = [
    ({"mine": {}}, "mine", "holds nothing to compare"),
    ({"mine": {"o": torch.ones(1)}}, "mine.o", "is no result of attention; known: out, lse"),
    ({"mine": {"out": torch.ones(2, 2, 24, 5)}}, "mine.out", "must have shape [2, 2, 24, 16], got"),
    ({"mine": {"lse": torch.ones(2, 24, 2)}}, "mine.lse", "must have shape [2, 2, 24], got"),
    ({"mine": {"out": torch.ones(2, 2, 24, 16, dtype=torch.int64)}}, "mine.out", "floating point"),
    ({"mine": {"dq": torch.ones(2, 2, 24, 16)}}, "dout", "gradients cannot be compared without"),
    ({"dlse": torch.ones(2, 2, 24)}, "dout", "gradients cannot be compared without"),
    ({"dout": torch.ones(2, 2, 24, 16), "mine": {"dsinks": torch.ones(2)}}, "mine.dsinks",
     "there is no sinks in the request"),
    ({"dout": torch.ones(2, 2, 24, 4)}, "dout", "must have shape [2, 2, 24, 16]"),
    ({"backends": ("cpu", "gpu")}, "backend", "must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "field", "message"), WRONG)
def test_each_violation(arguments, field, message):
    with pytest.raises(InvalidAttention) as caught:
        run(make(Case()), **arguments)
    [violation] = caught.value.violations
    assert violation.field == field
    assert message in violation.message


def test_every_violation_of_mine_at_once():
    mine = {"out": torch.ones(1), "o": torch.ones(1), "dq": torch.ones(1)}
    with pytest.raises(InvalidAttention) as caught:
        run(make(Case()), mine=mine)
    assert [v.field for v in caught.value.violations] == ["dout", "mine.out", "mine.o"]


def test_memory_is_refused_before_anything_is_made():
    huge = torch.zeros(1, dtype=torch.float16).expand(1, 1, 10**6, 16)
    with pytest.raises(NotEnoughMemory) as caught:
        check(huge, huge, huge, memory_limit=2**30)
    assert caught.value.needed > 80 * 10**12
    assert caught.value.available == 2**30
    assert run(make(Case()), memory_limit=2**30).passed


def test_json_has_the_keys_of_the_contract():
    found = compare(tensor(1.0, 2.5), tensor(1, 2), budget=0.75)
    assert found.to_json() == {
        "max_abs": 0.5,
        "rel": 0.25,
        "budget": 0.75,
        "pass": True,
        "worst": {"index": [1], "got": 2.5, "want": 2.0},
    }
    assert compare(torch.ones(0), torch.ones(0), budget=0.0).to_json()["worst"] is None

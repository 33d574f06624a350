"""The specification against the contract's formulas written out once more, entry by entry."""

import dataclasses
import math

import pytest
import torch

from flashwire_kernels import api
from flashwire_kernels.philox import keep_tile
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.testing import Case, make

OPTIONS = {
    "heads_q": 4,
    "heads_kv": 2,
    "len_q": 6,
    "len_k": 8,
    "dim": 3,
    "dim_v": 5,
    "dtype": "float64",
    "scale": 0.8,
    "softcap": 1.7,
    "alibi": "bh",
    "sinks": True,
    "mask": "b1qk",
    "bias": "1hqk",
    "dropout": 0.3,
}


def forward(call, **changed):
    return api.forward(**call.tensors | changed, spec=call.spec, backend="reference")


def backward(call):
    tensors = call.tensors
    wanted = Wanted(bias="bias" in tensors, sinks="sinks" in tensors)
    found = api.backward(
        call.dout, **tensors, dlse=call.dlse, wanted=wanted, spec=call.spec, backend="reference"
    ).gradients
    named = {"q": found.dq, "k": found.dk, "v": found.dv, "bias": found.dbias}
    return {n: t for n, t in (named | {"sinks": found.dsinks}).items() if t is not None}


def one_row(call, q, k, v, b, h, i, len_q, len_k):
    """out and lse of one query, in Python floats; q, k, v are (L, D) of its sequence and head."""
    spec, t = call.spec, call.tensors
    pos = i + (len_k - len_q if spec.causal_align == "bottom_right" else 0)
    left, right = spec.window or (None, None)
    scores = {}
    for j in range(len_k):
        s = spec.scale * math.fsum(float(x) * float(y) for x, y in zip(q[i], k[j], strict=True))
        s = spec.softcap * math.tanh(s / spec.softcap)
        s -= float(t["alibi_slopes"][b, h]) * abs(pos - j)
        bias = float(t["bias"][0, h, i, j])
        hidden = (
            (spec.causal and j > pos)
            or (left is not None and j < pos - left)
            or (right is not None and j > pos + right)
            or not bool(t["mask"][b, 0, i, j])
            or bias == -math.inf
        )
        if not hidden:
            scores[j] = s + bias
    total = math.fsum(map(math.exp, [*scores.values(), float(t["sinks"][h])]))
    if total == 0:
        return [0.0] * v.shape[1], -math.inf
    lse = math.log(total)
    tile = keep_tile(spec.dropout_seed, spec.dropout_p, batch=[b], heads=range(h, h + 1),
                     rows=range(i, i + 1), cols=range(len_k))[0, 0, 0]  # fmt: skip
    p = {j: math.exp(s - lse) * bool(tile[j]) / (1 - spec.dropout_p) for j, s in scores.items()}
    return [math.fsum(p[j] * float(v[j, d]) for j in p) for d in range(v.shape[1])], lse


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("causal", "window"), [(True, (3, 0)), (False, (2, 1)), (True, None)])
def test_every_entry_of_a_dense_forward(align, causal, window):
    case = Case(**OPTIONS, causal=causal, causal_align=align, window=window)
    call = make(case)
    found, t = forward(call), call.tensors
    for b in range(case.batch):
        for h in range(case.heads_q):
            q, k, v = t["q"][b, h], t["k"][b, h // 2], t["v"][b, h // 2]
            for i in range(case.len_q):
                out, lse = one_row(call, q, k, v, b, h, i, case.len_q, case.len_k)
                assert found.out[b, h, i].tolist() == pytest.approx(out, abs=1e-13)
                assert float(found.lse[b, h, i]) == pytest.approx(lse, abs=1e-13)


def test_every_entry_of_a_packed_forward():
    lens_q, lens_k = (3, 0, 6), (5, 2, 8)
    case = Case(**OPTIONS, causal=True, lens_q=lens_q, lens_k=lens_k, padding=2)
    call = make(case)
    found, t = forward(call), call.tensors
    first_q = first_k = 0
    for b, (len_q, len_k) in enumerate(zip(lens_q, lens_k, strict=True)):
        rows, keys = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        for h in range(case.heads_q):
            q, k, v = t["q"][rows, h], t["k"][keys, h // 2], t["v"][keys, h // 2]
            for i in range(len_q):
                out, lse = one_row(call, q, k, v, b, h, i, len_q, len_k)
                assert found.out[first_q + i, h].tolist() == pytest.approx(out, abs=1e-13)
                assert float(found.lse[first_q + i, h]) == pytest.approx(lse, abs=1e-13)
        first_q, first_k = rows.stop, keys.stop
    assert (found.out[first_q:] == 0).all()
    assert (found.lse[first_q:] == -torch.inf).all()


FORMS = [{}, {"lens_q": (3, 0, 4), "lens_k": (5, 2, 4), "padding": 1}]


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
@pytest.mark.parametrize("bias", ["1hqk", "b11k", "q1"])
@pytest.mark.parametrize("form", FORMS, ids=["dense", "packed"])
def test_gradients_equal_finite_differences(form, bias, name):
    call = make(Case(**OPTIONS | {"bias": bias}, causal=True, window=(4, 0), **form))
    got, given = backward(call)[name], call.tensors[name]
    step, worst = 1e-5, 0.0
    for index in range(given.numel()):
        ends = []
        for sign in (-1, 1):
            moved = given.clone()
            moved.view(-1)[index] += sign * step
            found = forward(call, **{name: moved})
            counted = torch.where(found.lse == -torch.inf, 0, found.lse * call.dlse)
            ends.append(float((found.out * call.dout).sum() + counted.sum()))
        worst = max(worst, abs((ends[1] - ends[0]) / (2 * step) - float(got.view(-1)[index])))
    assert got.abs().max() > 1e-3  # there is something to be wrong about
    assert worst <= 1e-7


@pytest.mark.parametrize("holder", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_visible_nan_reaches_exactly_the_rows_that_see_it(holder, value):
    case = Case(len_q=6, len_k=6, dtype="float64", causal=True, heads_q=4)
    call = make(case)
    clean = forward(call), backward(call)
    tensors, changed = dict(call.tensors), dataclasses.replace(call)
    if holder in tensors:
        tensors[holder] = tensors[holder].clone()
        changed = dataclasses.replace(call, tensors=tensors)
        tensors[holder][1, 1, 3, 0] = value
    else:
        changed = dataclasses.replace(call, **{holder: getattr(call, holder).clone()})
        getattr(changed, holder)[1, 1, 3] = value
    found, gradients = forward(changed), backward(changed)

    heads = slice(2, 4) if holder in "kv" else slice(1, 2)  # key head 1 serves query heads 2 and 3
    rows = torch.zeros(2, 4, 6, dtype=torch.bool)
    rows[1, heads, 3 if holder not in "kv" else slice(3, 6)] = True
    forward_rows = rows if holder in ("q", "k", "v") else torch.zeros_like(rows)
    assert torch.equal(~found.out.isfinite().all(-1), forward_rows)
    assert torch.equal(~gradients["q"].isfinite().all(-1), rows)
    assert torch.equal(found.out[~forward_rows], clean[0].out[~forward_rows])
    assert torch.equal(gradients["q"][~rows], clean[1]["q"][~rows])
    lse_rows = rows if holder in ("q", "k") else torch.zeros_like(rows)
    assert torch.equal(~found.lse.isfinite(), lse_rows)
    for name in "kv":
        assert gradients[name][0].isfinite().all()  # the other batch row
        assert gradients[name][1, 0 if heads.start == 2 else 1].isfinite().all()  # the other head


def test_an_infinite_sink_leaves_nothing_finite():
    call = make(Case(sinks=True, heads_q=3, heads_kv=1))
    call.tensors["sinks"][1] = math.inf
    found = forward(call)
    assert found.out.isfinite().all(-1).all(-1).tolist() == [[True, False, True]] * 2
    assert found.lse.isfinite().all(-1).tolist() == [[True, False, True]] * 2


def test_a_key_hidden_from_one_head_of_a_group_only():
    call = make(Case(heads_q=4, heads_kv=2, len_q=5, len_k=5, mask="1hqk", blind_rows=False))
    mask = call.tensors["mask"].fill_(True)
    mask[0, 0, :, 2] = False
    clean = forward(call)
    call.tensors["k"][:, 0, 2] = math.nan
    call.tensors["v"][:, 0, 2] = math.inf
    found, gradients = forward(call), backward(call)
    others = [0, 2, 3]  # query head 1 shares the key head, and sees the key
    assert torch.equal(found.out[:, others], clean.out[:, others])
    assert torch.equal(found.lse[:, others], clean.lse[:, others])
    assert not found.out[:, 1].isfinite().any()
    assert gradients["q"][:, others].isfinite().all()


def test_partial_gradients_add_up_to_those_of_the_union():
    """Two halves of the keys, each given the union's out and lse, as ring attention computes."""
    call = make(Case(dtype="float64", len_k=10, dlse=False))
    t, whole = call.tensors, forward(call)
    want, halves = backward(call), []
    for keys in (slice(0, 4), slice(4, 10)):
        part = {"q": t["q"], "k": t["k"][:, :, keys], "v": t["v"][:, :, keys]}
        found = api.backward(
            call.dout, **part, out=whole.out, lse=whole.lse, spec=call.spec, backend="reference"
        )
        halves.append(found.gradients)
    torch.testing.assert_close(halves[0].dq + halves[1].dq, want["q"], rtol=0, atol=1e-14)
    for name, got in (("k", [h.dk for h in halves]), ("v", [h.dv for h in halves])):
        torch.testing.assert_close(torch.cat(got, 2), want[name], rtol=0, atol=1e-14)


def test_results_round_once_to_their_dtypes():
    call = make(Case(dtype="bfloat16", bias="qk", bias_dtype="float32", sinks=True))
    found, gradients = forward(call), backward(call)
    assert found.out.dtype == torch.bfloat16
    assert found.lse.dtype == torch.float32
    assert [gradients[n].dtype for n in ("q", "bias", "sinks")] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    ]
    wide = {n: t.double() if t.is_floating_point() else t for n, t in call.tensors.items()}
    exact = api.forward(**wide, spec=call.spec, backend="reference")
    assert torch.equal(found.out, exact.out.to(torch.bfloat16))
    assert torch.equal(found.lse, exact.lse.float())

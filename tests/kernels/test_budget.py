"""The error budget: its parts by hand, and that it lets no fault through."""

import dataclasses
import math

import pytest
import torch

from flashwire_kernels import plain
from flashwire_kernels.budget import bytes_needed, expectations
from flashwire_kernels.check import check
from flashwire_kernels.reference import backward64, forward64
from flashwire_kernels.tensors import Inputs, Wanted
from flashwire_kernels.testing import Case, make, pairwise, resolve_tensors
from flashwire_kernels.types import AttentionSpec

GRID = {
    "form": [{}, {"lens_q": (9, 0, 14), "lens_k": (11, 3, 9), "padding": 2}],
    "heads_kv": [4, 2, 1],
    "causal": [False, True],
    "window": [None, (4, 2), (None, 0)],
    "softcap": [None, 1.5],
    "dropout": [0.0, 0.4],
    "alibi": [None, "h", "bh"],
    "sinks": [False, True],
    "mask": [None, "b1qk", "1hq1"],
    "bias": [None, "1hqk", "k"],
    "dlse": [True, False],
}


def canonical(call):
    """The problem and canonical inputs of a call that is dense (B, H, L, D), or packed."""
    given = {name: t for name, t in call.tensors.items() if not name.startswith("cu_")}
    return resolve_tensors(call.spec, call.tensors), Inputs(**given)


def one_query(*, q, k, v, dtype=torch.float64, scale=1, **options):
    """One query and some keys, all of head_dim 1, as a problem."""
    rows = {"q": [q], "k": k, "v": v}
    tensors = {n: torch.tensor(r, dtype=dtype).reshape(1, 1, -1, 1) for n, r in rows.items()}
    tensors |= {n: torch.tensor(o, dtype=dtype) for n, o in options.items()}
    return resolve_tensors(AttentionSpec(scale=scale), tensors), Inputs(**tensors)


def test_plain_attention_and_the_reference_agree():
    """Autograd through plain attention, and the reference's formulas: two ways to one result."""
    for seed, row in enumerate(pairwise(GRID)):
        form = row.pop("form")
        call = make(Case(dtype="float64", heads_q=4, poison=True, seed=seed, **form, **row))
        problem, x = canonical(call)
        out, lse = forward64(problem, x)
        wanted = Wanted(bias=True, sinks=True)
        exact = backward64(problem, x, out, lse, call.dout, call.dlse, wanted)
        by_autograd = plain.attention(problem, x, call.dout, call.dlse)
        for name, got in by_autograd.items():
            want = out if name == "out" else getattr(exact, name)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=f"{name} of seed {seed}")


@pytest.mark.parametrize(("dtype", "t"), [(torch.float64, 2**-51), (torch.float32, 2**-22)])
def test_the_budget_of_lse(dtype, t):
    problem, x = one_query(q=2.0, k=[1.0, -3.0], v=[1.0, 1.0], dtype=dtype)
    assert expectations(problem, x)["lse"].budget == t * 7
    problem, x = one_query(q=2.0, k=[1.0, -3.0], v=[1.0, 1.0], dtype=dtype, sinks=[-9.0])
    assert expectations(problem, x)["lse"].budget == t * 10
    problem, x = one_query(q=2.0, k=[1.0, -3.0], v=[1.0, 1.0], dtype=dtype, bias=[0.0, -math.inf])
    assert expectations(problem, x)["lse"].budget == t * 3


def test_the_budgets_of_a_single_key():
    """p = 1, dp = delta = 12; plain attention makes no error: only (u + t (1 + S)) A is left."""
    units = {
        torch.float64: (0, 2**-52),
        torch.float32: (0, 2**-23),
        torch.bfloat16: (2**-8, 2**-23),
        torch.float16: (2**-11, 2**-23),
    }
    for dtype, (u, t) in units.items():
        problem, x = one_query(q=2.0, k=[-1.0], v=[4.0], dtype=dtype, scale=-0.5)
        expected = expectations(problem, x, torch.full((1, 1, 1, 1), 3.0, dtype=dtype))
        unit = u + t * 2
        assert {name: e.budget / unit for name, e in expected.items() if name != "lse"} == {
            "out": 4.0,
            "dv": 3.0,
            "dq": 12.0,
            "dk": 24.0,
        }
        assert {name: float(e.want) for name, e in expected.items()} == {
            "out": 4.0, "lse": 1.0, "dv": 3.0, "dq": 0.0, "dk": 0.0}  # fmt: skip


def test_the_error_of_plain_attention_counts_twice():
    problem, x = one_query(q=1.0, k=[0.3, 2.7, -1.1], v=[0.7, -5.3, 2.1], dtype=torch.bfloat16)
    s, v = (x.q * x.k.double()).flatten(), x.v.double().flatten()
    p = torch.softmax(s, 0)
    error = abs(float(plain.attention(problem, x)["out"]) - float(p @ v))
    unit = 2**-8 + 2**-23 * (1 + float(s.logsumexp(0)))  # here more than any |s|
    assert error > 1e-3
    budget = expectations(problem, x)["out"].budget
    assert budget == pytest.approx(2 * error + unit * float(p @ v.abs()), rel=1e-12)


def test_a_gradient_may_be_as_coarse_as_its_own_dtype():
    problem, x = one_query(q=2.0, k=[-1.0], v=[4.0], sinks=[-2.0])
    coarse = dataclasses.replace(x, sinks=x.sinks.bfloat16())
    dout = torch.full((1, 1, 1, 1), 3.0, dtype=torch.float64)
    fine = expectations(problem, x, dout)["dsinks"].budget
    assert expectations(problem, coarse, dout)["dsinks"].budget > 2**-9 > 1e9 * fine


def test_what_a_nan_does_to_other_rows_is_not_promised():
    call = make(Case(heads_q=4, heads_kv=2, causal=True, len_q=6, len_k=6))
    problem, x = canonical(call)
    x.v[1, 0, 2, 0] = math.nan
    expected = expectations(problem, x, call.dout)
    rows = torch.ones(2, 4, 6, dtype=torch.bool)
    rows[1, :2] = False
    assert torch.equal(expected["lse"].promised, rows)
    rows[1, :2, 2:] = True  # these see the NaN
    assert torch.equal(expected["out"].promised[..., 0], rows)
    assert torch.equal(expected["out"].promised[..., 1], rows & (rows.sum(-1) == 6)[..., None])
    assert expected["dv"].promised[0].all()
    assert not expected["dv"].promised[1, 0].any()
    assert expected["dv"].promised[1, 1].all()


GROSS = [{"window": (6, 0)}, {"causal_align": "top_left"}, {"dropout_seed": 12}]
FINE = [{"scale": 0.250003}, {"softcap": 2.0003}, {"dropout_p": 0.2001}]


@pytest.mark.parametrize(
    ("fault", "dtype"), [(f, "bfloat16") for f in GROSS] + [(f, "float32") for f in GROSS + FINE],
    ids=str)  # fmt: skip
def test_faults_exceed_the_budget(fault, dtype):
    call = make(Case(len_q=40, len_k=60, dtype=dtype))
    spec = AttentionSpec(
        causal=True, window=(5, 0), softcap=2.0, scale=0.25, dropout_p=0.2, dropout_seed=11
    )
    problem, x = canonical(dataclasses.replace(call, spec=dataclasses.replace(spec, **fault)))
    out, lse = forward64(problem, x)
    g = backward64(problem, x, out, lse, call.dout, None, Wanted())
    mine = {"out": out, "dq": g.dq, "dk": g.dk, "dv": g.dv}
    report = check(**call.tensors, spec=spec, dout=call.dout, mine=mine)
    assert not any(comparison.passed for comparison in report.tensors.values())


def test_products_of_reduced_precision_exceed_the_budget():
    """TF32 keeps 10 bits of a float32's 23."""
    call = make(Case(len_q=40, len_k=60, dim=64))
    reduced = {n: ((t.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
               for n, t in call.tensors.items()}  # fmt: skip
    problem, x = canonical(dataclasses.replace(call, tensors=reduced))
    out, lse = forward64(problem, x)
    report = check(**call.tensors, spec=call.spec, mine={"out": out, "lse": lse})
    assert not report.tensors["out"].passed
    assert not report.tensors["lse"].passed


def test_p_rounded_to_bfloat16_is_within_the_budget():
    """What tensor cores make of it: products summed in float32, p and ds rounded once."""
    call = make(Case(len_q=40, len_k=60, dtype="bfloat16", dlse=False))
    q, k, v, dout = (t.float() for t in (*(call.tensors[n] for n in "qkv"), call.dout))
    s = q @ k.mT * 16**-0.5
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    out = (p.bfloat16().float() @ v).bfloat16()
    delta = (dout * out.float()).sum(-1, keepdim=True)
    ds = (p * (dout @ v.mT - delta)).bfloat16().float()
    gradients = {"dq": ds @ k / 4, "dk": ds.mT @ q / 4, "dv": p.bfloat16().float().mT @ dout}
    mine = {"out": out, "lse": lse} | {n: t.bfloat16() for n, t in gradients.items()}
    assert check(**call.tensors, spec=call.spec, dout=call.dout, mine=mine).passed


def test_memory_grows_with_the_largest_piece():
    def needed(**sizes):
        return bytes_needed(canonical(make(Case(**sizes)))[0])

    assert needed(len_q=512, len_k=512) > 2 * 2 * 512 * 512 * 80
    dense = needed(batch=8, len_q=512, len_k=512)
    assert needed(lens_q=(512,) * 8, lens_k=(512,) * 8) < dense / 4
    assert needed(batch=0) == 0

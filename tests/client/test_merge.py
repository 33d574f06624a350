"""The union of key sets, by lse: exactly what attention over all keys gives."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from flashwire import merge

RNG = np.random.default_rng(11)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: Any = True) -> Any:
    s = np.where(visible, q @ np.swapaxes(k, -1, -2), -np.inf)
    top = np.where(np.isneginf(s.max(-1)), 0, s.max(-1))[..., None]
    total = np.exp(s - top).sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top[..., 0]
    return np.exp(s - top) @ v / np.where(total == 0, 1, total)[..., None], lse


@pytest.fixture
def parts() -> Any:
    """Three sets of keys; row 0 sees nothing in the first, row 1 nothing at all."""
    q, k, v = (RNG.standard_normal(shape) for shape in ((2, 3, 4, 5), (2, 3, 9, 5), (2, 3, 9, 6)))
    visible = np.ones((4, 9), bool)
    visible[0, :3] = False
    visible[1] = False
    sets = [
        attend(q, k[:, :, a:b], v[:, :, a:b], visible[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 9))
    ]
    return [out for out, _ in sets], [lse for _, lse in sets], attend(q, k, v, visible)


def test_union_of_three(parts: Any) -> None:
    outs, lses, (want_out, want_lse) = parts
    out, lse = merge(outs, lses)
    np.testing.assert_allclose(out, want_out, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-14)
    assert np.isneginf(lse[:, :, 1]).all()
    assert (out[:, :, 1] == 0).all()


def test_grouping_does_not_matter(parts: Any) -> None:
    outs, lses, (want, _) = parts
    first = merge(outs[:2], lses[:2])
    out, _ = merge([outs[2], first[0]], [lses[2], first[1]])
    np.testing.assert_allclose(out, want, rtol=1e-13, atol=1e-15)


def test_torch_is_the_same_and_differentiable(parts: Any) -> None:
    outs, lses, (want_out, _) = parts
    leaves = [torch.from_numpy(x).requires_grad_() for x in (*outs, *lses)]
    out, lse = merge(leaves[:3], leaves[3:])
    np.testing.assert_allclose(out.detach().numpy(), want_out, rtol=1e-13, atol=1e-15)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    shares = torch.softmax(torch.stack([x.detach() for x in leaves[3:]]), 0)
    rows = shares.isfinite()[0]
    np.testing.assert_allclose(grads[0][..., 0][rows], shares[0][rows], rtol=1e-12)
    assert lse.dtype == torch.float64


def test_layout_blhd(parts: Any) -> None:
    outs, lses, (want, want_lse) = parts
    out, lse = merge([np.swapaxes(o, 1, 2) for o in outs], lses, layout="blhd")
    np.testing.assert_allclose(np.swapaxes(out, 1, 2), want, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-14)
    flat, _ = merge([np.swapaxes(o[0], 0, 1) for o in outs], [x[0] for x in lses], layout="blhd")
    np.testing.assert_array_equal(flat, out[0])


@pytest.mark.parametrize("rank", [2, 3])
def test_lower_ranks(parts: Any, rank: int) -> None:
    outs, lses, (want, _) = parts
    pick = (0,) * (4 - rank)
    out, lse = merge([o[pick] for o in outs], [x[pick] for x in lses])
    np.testing.assert_allclose(out, want[pick], rtol=1e-13, atol=1e-15)
    assert lse.shape == want.shape[4 - rank : 3]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_dtypes_are_kept_and_computed_wide(dtype: Any) -> None:
    """Scores so far apart, and so large, that 16 bits could not hold their exponentials."""
    out, lse = merge(
        [np.array([[1.0]], dtype), np.array([[3.0]], dtype)],
        [np.array([1000.0], np.float32), np.array([1000.0], np.float32)],
    )
    assert (out.dtype, lse.dtype) == (dtype, np.float32)
    assert out[0, 0] == 2.0
    np.testing.assert_allclose(lse, 1000 + np.log(2), rtol=1e-7)


def test_one_set_is_itself(parts: Any) -> None:
    outs, lses, _ = parts
    out, lse = merge(outs[:1], lses[:1])
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])


@pytest.mark.parametrize("xp", [np, torch])
def test_what_a_hidden_row_holds_does_not_count(xp: Any) -> None:
    outs = [xp.asarray([[float("nan")]]), xp.asarray([[5.0]])]
    out, lse = merge(outs, [xp.asarray([-float("inf")]), xp.asarray([2.0])])
    assert (float(out[0, 0]), float(lse[0])) == (5.0, 2.0)


def test_streaming_by_twos() -> None:
    """lse of [3, 1, 6, 2] in blocks of two is 6 + ln(1 + e^-3 + e^-5 + e^-4)."""
    scores = np.array([3.0, 1.0, 6.0, 2.0])
    blocks = [attend(np.ones((1, 1)), scores[a : a + 2, None], np.ones((2, 1))) for a in (0, 2)]
    _, lse = merge([out for out, _ in blocks], [lse for _, lse in blocks])
    np.testing.assert_allclose(lse, 6.0722, atol=5e-5)


@pytest.mark.parametrize(
    ("outs", "lses", "layout", "words"),
    [
        ([], [], "bhld", "one lse for each out"),
        ([np.ones((2, 3))], [], "bhld", "1 outs, 0 lses"),
        ([np.ones((2, 3))], [np.ones(3)], "bhld", "without the head dimension"),
        ([np.ones((2, 3)), np.ones((3, 3))], [np.ones(2)] * 2, "bhld", "outs differ in shape"),
        ([np.ones((2, 3))] * 2, [np.ones(2), np.ones(1)], "bhld", "lses differ in shape"),
        ([np.ones((2, 3))], [np.ones(2)], "hbld", "layout must be"),
    ],
)
def test_shapes_that_do_not_fit(outs: Any, lses: Any, layout: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        merge(outs, lses, layout=layout)

"""docs/performance.md holds what bench/roofline.py computes, which agrees with the plan."""

import pytest

import roofline
from flashwire_kernels import AttentionSpec
from flashwire_kernels.plan import plan
from flashwire_kernels.types import TensorHeader
from flashwire_kernels.validation import resolve

SHAPES = [shape for shape, _ in roofline.SHAPES]


def test_the_document_is_as_computed():
    text = roofline.DOC.read_text()
    assert roofline.written(text) == text
    assert text.count("<!-- roofline ") == len(roofline.TABLES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_work_is_that_of_the_plan(shape):
    q = TensorHeader("bfloat16", (shape.batch, shape.heads, shape.queries, shape.dim))
    k = TensorHeader("bfloat16", (shape.batch, shape.heads_kv, shape.keys, shape.dim))
    counted = plan(resolve(AttentionSpec(causal=shape.causal), {"q": q, "k": k, "v": k}))
    work = roofline.forward(shape)
    assert work.flops == counted.flops_fwd
    assert work.exponentials == counted.visible_pairs
    assert work.nbytes == counted.bytes_min
    # keys and queries both compute scores and dP, of which the plan counts one each
    both = roofline.keys(shape).flops + roofline.queries(shape).flops
    assert both == counted.flops_bwd * 7 / 5


def test_a_roof_by_hand():
    """128 x 128 scores and D of 128 on Hopper: 2048, 1024 and 1024 clocks."""
    low, high = roofline._between("sm_90", 2, 128)
    assert high == pytest.approx(989.4, abs=0.1)
    assert low == pytest.approx(989.4 / 2, abs=0.1)


def test_what_a_decode_takes_is_its_cache():
    shape, _ = roofline.SHAPES[-1]
    cache = 2 * shape.batch * shape.heads_kv * shape.keys * shape.dim * 2
    h200 = roofline.DEVICES[2]
    least, what = roofline.decode(shape).least(h200)
    assert what == "memory"
    assert cache / 4.8e6 <= least <= 1.02 * cache / 4.8e6


def test_a_missing_marker_is_said():
    with pytest.raises(KeyError):
        roofline.written("no table")

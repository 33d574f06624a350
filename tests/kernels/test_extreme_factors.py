"""Scale and softcap at the ends of what a float can be: right, or refused with the reason."""

import pytest
import torch

from flashwire_kernels import api
from flashwire_kernels.check import check
from flashwire_kernels.errors import UnsupportedBackend
from flashwire_kernels.types import AttentionSpec


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 9, 8, generator=generator).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("scale", "softcap"),
    [(None, 1e-40), (None, 4e38), (1e30, 1e-30), (0.0, 1e-40), (1e-45, None), (1e10, None),
     (-1e10, None)],
)  # fmt: skip
def test_within_budget(scale, softcap, causal, dtype):
    q, k, v, dout = tensors(dtype)
    spec = AttentionSpec(scale=scale, softcap=softcap, causal=causal)
    report = check(q, k, v, dout=dout, spec=spec, backends=("cpu", "reference"))
    assert report.passed, report
    assert api.forward(q, k, v, spec=spec, backend="cpu").out.isfinite().all()


@pytest.mark.parametrize(
    ("scale", "softcap"), [(None, 5e-324), (None, 1e300), (1e300, None), (1e200, 1e-200)]
)
def test_beyond_float64_is_refused_by_name_and_left_to_the_reference(scale, softcap):
    q, k, v, _ = tensors(torch.float32)
    spec = AttentionSpec(scale=scale, softcap=softcap)
    with pytest.raises(UnsupportedBackend, match="scale"):
        api.forward(q, k, v, spec=spec, backend="cpu")
    forward = api.forward(q, k, v, spec=spec)
    assert forward.backend == "reference"
    assert forward.out.isfinite().all()
    assert "scale" in forward.skipped[-1].reasons[0]

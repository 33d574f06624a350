"""Which backends the conformance suite runs, and how it judges them."""

import importlib.util
import os
from collections import Counter

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, for its own functions, too

from flashwire_kernels import api
from flashwire_kernels.check import check
from flashwire_kernels.errors import UnsupportedBackend
from flashwire_kernels.fused import support as fused_support
from flashwire_kernels.testing import Case, make
from interpreted import interpret_bfloat16, interpret_helpers_once

TRITON = "triton"
BACKENDS = ("reference", "cpu", TRITON)


KEPT = 5
"""Of the interpreted cases of each test, which are slow, one in so many runs in `make test`."""


def pytest_collection_modifyitems(items):
    """Leave most interpreted cases to `make test-long`, but for those that pair all options."""
    seen = Counter()
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = getattr(item, "originalname", item.name)
        values = [] if callspec is None else callspec.params.values()
        if TRITON not in [value for value in values if isinstance(value, str)]:
            continue
        if item.path.name == "test_fused.py" or name == "test_every_pair_of_options":
            continue
        if seen[name] % KEPT:
            item.add_marker(pytest.mark.long)
        seen[name] += 1


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Every backend, the reference included."""
    return prepare(request.param, request)


@pytest.fixture(params=[name for name in BACKENDS if name != "reference"])
def fast_backend(request):
    """Every backend but the reference, for what is large or says nothing about the reference."""
    return prepare(request.param, request)


@pytest.fixture
def interpreted(request):
    """Triton's kernels run in this test, interpreted."""
    return prepare(TRITON, request)


def prepare(backend, request):
    """Have triton's kernels run, where they are asked for, in this test."""
    if backend != TRITON:
        return backend
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from triton.language import zeros

    assert type(zeros).__name__ == "InterpretedFunction", "triton was imported too early"
    settings = np.geterr()
    request.addfinalizer(lambda: np.seterr(**settings))
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    interpret(request.getfixturevalue("monkeypatch"))
    return backend


def interpret(patch):
    """Have triton's kernels interpreted, on CPU tensors, writing into memory full of NaN."""
    patch.setattr(fused_support, "DEVICES", {"cuda", "cpu"})
    interpret_bfloat16(patch)
    interpret_helpers_once(patch)
    np.seterr(all="ignore")  # infinities are how hidden pairs are computed
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN


@pytest.fixture
def assert_conforms():
    """Forward and backward of a case or call, on a backend, within the budget of the contract."""

    def assert_conforms(case, backend):
        call = make(case) if isinstance(case, Case) else case
        tensors = call.tensors
        dims = tensors["q"].shape[-1], tensors["v"].shape[-1]
        if backend == "triton" and (tensors["q"].dtype == torch.float64 or max(dims) > 256):
            with pytest.raises(UnsupportedBackend):
                api.forward(**tensors, spec=call.spec, backend=backend)
            return
        report = check(
            **call.tensors,
            spec=call.spec,
            dout=call.dout,
            dlse=call.dlse,
            backends=(backend, "reference"),
        )
        off = {name: c for name, c in report.tensors.items() if not c.passed}
        assert not off, backend
        assert report.got == backend

    return assert_conforms

"""Which backends the conformance suite runs, and how it judges them."""

import pytest

from flashwire_kernels.check import check
from flashwire_kernels.testing import Case, make

BACKENDS = ("reference", "cpu")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Every backend, the reference included."""
    return request.param


@pytest.fixture(params=[name for name in BACKENDS if name != "reference"])
def fast_backend(request):
    """Every backend but the reference, for what is large or says nothing about the reference."""
    return request.param


@pytest.fixture
def assert_conforms():
    """Forward and backward of a case or call, on a backend, within the budget of the contract."""

    def assert_conforms(case, backend):
        call = make(case) if isinstance(case, Case) else case
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

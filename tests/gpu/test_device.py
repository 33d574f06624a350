"""What bench/gpu_check.py checks on a device, as tests: `pytest -m gpu tests/gpu`, in order."""

import os

import pytest
import torch

from gpu import conformance
from gpu.items import PASS, SKIPPED
from gpu.place import Gpu, Host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deterministic"),  # only memory is wanted full of NaN
]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the device is first used


@pytest.fixture(scope="module")
def device():
    """The GPU, with kernels that are compiled."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA or ROCm device")
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("kernels are interpreted in this process: run tests/gpu by itself")
    return Gpu()


class Listing(Host):
    """Tells the items of a device without one."""

    dry = False


@pytest.mark.parametrize("item", conformance.items(Listing(), {}), ids=lambda item: item.name)
def test_conforms(item, device):
    row = item.run(device)
    if row["status"] == SKIPPED:
        pytest.skip(row["why"])
    assert row["status"] == PASS, row

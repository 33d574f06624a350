"""Which device a worker takes, on machines that have what this one lacks."""

import importlib.util

import pytest
import torch

from flashwire_service import kernel_cache
from flashwire_service.compute import device as devices

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """machine(GPUs, whether triton is installed)"""

    def make(gpus, triton=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        found = object() if triton else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)

    return make


def test_auto_takes_a_gpu_that_is_of_use(machine):
    machine(1)
    assert devices.choose("auto") == torch.device("cuda", 0)
    assert devices.choose("cpu") == CPU
    machine(1, triton=False)
    assert devices.choose("auto") == CPU
    machine(0)
    assert devices.choose("auto") == CPU


def test_each_worker_has_a_gpu_of_its_own_while_there_are_enough(machine):
    machine(2)
    assert [devices.choose("auto", worker).index for worker in range(3)] == [0, 1, 0]
    assert [devices.choose("cuda", worker).index for worker in range(3)] == [0, 1, 0]
    assert [devices.choose("cuda:1", worker).index for worker in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("setting", "gpus", "triton", "said"),
    [
        ("cuda", 0, True, "finds no GPU"),
        ("cuda:2", 2, True, "there are 2 GPUs"),
        ("cuda", 1, False, r"needs triton: pip install 'flashwire\[gpu\]'"),
    ],
)
def test_what_is_asked_for_and_not_there_is_named(machine, setting, gpus, triton, said):
    machine(gpus, triton)
    with pytest.raises(devices.NoDevice, match=f"'{setting}' .*{said}"):
        devices.choose(setting)


def test_kernels_that_cannot_be_kept_are_said_before_they_are_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    devices.require_kernel_cache(torch.device("cuda", 0))
    assert (tmp_path / "kernels").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(devices.NoDevice, match=r"FLASHWIRE_TRITON_CACHE_DIR: .*/file cannot be"):
        devices.require_kernel_cache(torch.device("cuda", 0))
    devices.require_kernel_cache(CPU)


def test_versions_tell_what_computes():
    versions = devices.facts(CPU)["versions"]
    assert versions["torch"] == torch.__version__
    assert (versions["hip"], versions["triton"]) == (torch.version.hip, None)
    import triton

    assert devices._triton_version() == triton.__version__


class Mounted:
    def __init__(self, flags):
        self.f_flag = flags


def test_a_directory_that_is_of_no_use(monkeypatch, tmp_path):
    assert kernel_cache.unusable(str(tmp_path)) is None
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        assert "cannot be written to" in kernel_cache.unusable(str(tmp_path))
    monkeypatch.setattr("os.statvfs", lambda path: Mounted(8))  # ST_NOEXEC
    assert "noexec" in kernel_cache.unusable(str(tmp_path))

"""Memory that is asked for before anything is launched, on a GPU that is not there."""

import pytest
import torch

from flashwire_kernels.errors import NotEnoughMemory
from flashwire_service.compute import device as devices
from flashwire_service.compute.failures import failure_of
from flashwire_service.compute.room import HostFull, Room
from flashwire_service.ipc.frames import Job, TensorSlot

MIB = 2**20
GPU = Room(torch.device("cuda", 0), max_materialise=64 * MIB)


@pytest.fixture(autouse=True)
def there(monkeypatch):
    """What is left of each memory."""
    left = {"device": 1024 * MIB, "host": 2048 * MIB}
    monkeypatch.setattr(devices, "available_bytes", lambda device: left["device"])
    monkeypatch.setattr(devices, "available_host_bytes", lambda: left["host"])
    return left


def job(elements=0, accept="msgpack", route="attention"):
    slots = {"q": TensorSlot("float16", (elements,), ((0, 2 * elements),))}
    return Job(id=1, route=route, tensors=slots, accept=accept)


def tensors(nbytes, **more):
    return {"q": torch.empty(nbytes // 2, dtype=torch.float16), **more}


def test_inputs_are_weighed_before_they_are_copied(there):
    GPU.require_inputs(job(512 * MIB))
    with pytest.raises(NotEnoughMemory) as caught:
        GPU.require_inputs(job(512 * MIB + 1))
    assert (caught.value.needed, caught.value.available) == (1024 * MIB + 2, 1024 * MIB)
    assert caught.value.needed > 0
    Room(torch.device("cpu"), 0).require_inputs(job(2**40))  # they lie in the host's memory


def test_a_backend_may_take_what_results_leave(there):
    large = tensors(2 * MIB)
    assert GPU.for_backend(job(), "auto", large, 100 * MIB) == 924 * MIB
    assert GPU.for_backend(job(), "auto", large, 100 * MIB, kept_bytes=900 * MIB) == 924 * MIB
    assert GPU.for_backend(job(), "reference", large, 100 * MIB) == 64 * MIB
    there["device"] = 110 * MIB
    assert GPU.for_backend(job(), "reference", large, 100 * MIB) == 10 * MIB
    with pytest.raises(NotEnoughMemory, match=f"needs {111 * MIB} bytes .* {110 * MIB} are"):
        GPU.for_backend(job(), "auto", large, 111 * MIB)


def test_what_is_small_is_not_asked_for(there):
    there["device"] = there["host"] = 0
    assert GPU.for_backend(job(), "auto", tensors(1024), 1024) is None
    GPU.require_inputs(job(100))
    with pytest.raises(NotEnoughMemory):  # its gradient is first summed for every head
        GPU.for_backend(job(), "auto", tensors(1024, bias=torch.empty(1)), 1024)


def test_a_reply_needs_the_hosts_memory(there):
    there["host"] = 100 * MIB
    with pytest.raises(HostFull) as caught:
        GPU.for_backend(job(), "auto", tensors(2 * MIB), 101 * MIB)
    failure = failure_of(caught.value, job(), 0)
    assert failure.code == "not_enough_memory"
    assert f"{101 * MIB} bytes of memory, {100 * MIB} are available" in failure.detail
    assert "on this machine" in failure.detail
    with pytest.raises(HostFull):  # text takes far more than numbers do
        GPU.for_backend(job(accept="json"), "auto", tensors(2 * MIB), 10 * MIB)
    GPU.for_backend(job(), "auto", tensors(2 * MIB), 10 * MIB)


def test_on_a_cpu_both_are_one(there):
    room = Room(torch.device("cpu"), 64 * MIB)
    large = tensors(2 * MIB)
    assert room.for_backend(job(), "auto", large, 100 * MIB, kept_bytes=24 * MIB) == 800 * MIB
    with pytest.raises(NotEnoughMemory):
        room.for_backend(job(), "auto", large, 500 * MIB, kept_bytes=25 * MIB)

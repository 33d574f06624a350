"""A device that is proved again between jobs."""

import pytest
import torch

from flashwire_service.compute import device as devices
from flashwire_service.compute.failures import DeviceLost
from flashwire_service.compute.proving import LIMIT_S, Proving
from flashwire_service.ipc.heartbeat import Heartbeat
from flashwire_service.logs import Log

CPU = torch.device("cpu")


class Idle:
    """An idle loop by a clock of its own; `computed` are the parts that were proved."""

    def __init__(self, monkeypatch, every=30.0, error=None):
        self.now, self.computed, self.error = 100.0, [], error
        self.heartbeat = Heartbeat.create()
        self.proving = Proving(CPU, every, self.heartbeat, Log("test", "error"), lambda: self.now)
        monkeypatch.setattr(devices, "prove_part", self.prove_part)

    def prove_part(self, device, number):
        assert self.heartbeat.complaint(self.now + LIMIT_S) is None
        assert self.heartbeat.complaint(self.now + LIMIT_S + 1) is not None
        self.computed.append(number)
        if self.error is not None:
            raise self.error

    def turn(self, seconds):
        self.now += seconds
        self.proving.turn()


def test_a_part_each_time_and_then_from_the_start(monkeypatch):
    idle = Idle(monkeypatch)
    idle.turn(29)
    assert idle.computed == []
    idle.turn(2)
    idle.turn(29)
    for _ in range(4):
        idle.turn(31)
    assert idle.computed == [0, 1, 2, 3, 0]
    assert len(devices.PARTS) == 4


def test_never(monkeypatch):
    idle = Idle(monkeypatch, every=0.0)
    idle.turn(10**6)
    assert idle.computed == []


@pytest.mark.parametrize("error", [devices.WrongAnswer("off"), RuntimeError("CUDA error: gone")])
def test_whatever_fails_is_a_lost_device(monkeypatch, error):
    with pytest.raises(DeviceLost):
        Idle(monkeypatch, error=error).turn(31)


def test_a_device_that_is_full_is_not_lost(monkeypatch):
    idle = Idle(monkeypatch, error=torch.OutOfMemoryError("CUDA out of memory"))
    idle.turn(31)
    idle.error = None
    idle.turn(31)
    assert idle.computed == [0, 0]

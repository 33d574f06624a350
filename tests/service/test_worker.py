"""The compute process itself: born, at work, ended."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from flashwire_service.environment import worker_environment
from flashwire_service.ipc.board import size_of
from flashwire_service.ipc.channel import Channel, ChannelClosed, socketpair
from flashwire_service.ipc.frames import (
    Attach,
    Drain,
    Failure,
    Hello,
    Job,
    Ready,
    Reply,
    TensorSlot,
)
from flashwire_service.ipc.heartbeat import Heartbeat
from flashwire_service.ipc.memory import Memory
from flashwire_service.process import DEVICE_LOST, Child
from flashwire_service.settings import Settings
from flashwire_service.supervisor import WORKER

PATIENCE_S = 60.0
ONES = b"\0\0\x80\x3f"


class Worker:
    def __init__(self, module: str = WORKER, **settings) -> None:
        configured = Settings(threads=1, **settings)
        self.heartbeat = Heartbeat.create()
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environment = {**worker_environment(configured), "PYTHONPATH": paths}
        self.board = Memory.create(size_of(configured.frontends, configured.workers))
        page, board = self.heartbeat.memory.fd, self.board.fd
        self.child = Child(module, 0, configured, page, board, environment)

    def attach(self, peer: int = 0) -> Channel:
        ours, theirs = socketpair()
        with theirs:
            self.child.tell(Attach(peer=peer), theirs.fileno())
        return Channel(ours)

    def close(self) -> None:
        self.child.kill()
        assert self.child.join(PATIENCE_S)
        self.child.terminate()
        self.heartbeat.close()
        self.board.close()


@pytest.fixture
def make():
    workers = []

    def start(module: str = WORKER, **settings) -> Worker:
        workers.append(Worker(module, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def attention(number: int, length: int = 1, **fields) -> Job:
    """q = k = v = one for every position."""
    body = ONES * length
    slot = TensorSlot("float32", (length, 1), ((0, len(body)),))
    fields = {"deadline": time.monotonic() + 60, "options": {"return_lse": True}, **fields}
    return Job(
        id=number,
        route="attention",
        tensors=dict.fromkeys("qkv", slot),
        size=len(body),
        body=body,
        accept="json",
        received=time.monotonic(),
        **fields,
    )


def test_a_worker_from_birth_to_the_end_of_its_lifeline(make):
    worker = make()
    front = worker.attach()  # before it is ready
    assert worker.heartbeat.complaint(time.monotonic()) is None
    ready = worker.child.control.recv(PATIENCE_S)[0]
    assert isinstance(ready, Ready)
    assert worker.heartbeat.started
    hello = front.recv(PATIENCE_S)[0]
    assert hello == Hello(worker=0, pid=worker.child.pid, facts=ready.facts)
    assert hello.facts["device"] == "cpu"
    assert hello.facts["threads"] == 1
    assert hello.facts["gflops"] > 0

    front.send(attention(1))
    reply = front.recv(PATIENCE_S)[0]
    assert isinstance(reply, Reply)
    assert reply.body.startswith(b'{"out":[[1.0]],"lse":[1.0],"meta":{"backend":"cpu"')

    front.send(attention(2, options={"scale": "nonsense"}))
    assert front.recv(PATIENCE_S)[0].code == "invalid"
    front.send(Job(id=3, route="no such route", deadline=time.monotonic() + 60))
    assert front.recv(PATIENCE_S)[0].code == "internal"
    late = worker.attach(peer=1)
    assert isinstance(late.recv(PATIENCE_S)[0], Hello)
    late.send(attention(4))
    assert late.recv(PATIENCE_S)[0].id == 4

    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.child.pid, number)
    front.send(attention(5))
    assert front.recv(PATIENCE_S)[0].id == 5

    worker.child.terminate()
    assert worker.child.join(PATIENCE_S)
    assert worker.child.exit_code == 0
    with pytest.raises(ChannelClosed):
        front.recv(PATIENCE_S)
    front.close()
    late.close()


def test_a_drained_worker_ends(make):
    worker = make()
    worker.child.tell(Drain(grace=0))
    assert worker.child.join(PATIENCE_S)
    assert worker.child.exit_code == 0
    assert worker.heartbeat.complaint(time.monotonic() + 60) is None  # coming down is not hanging


def test_a_device_that_is_not_there_is_said_to_the_supervisor(make):
    worker = make(device="cuda:63")
    frame = worker.child.control.recv(PATIENCE_S)[0]
    assert isinstance(frame, Failure)
    assert "cuda:63" in frame.detail
    assert worker.child.join(PATIENCE_S)
    assert worker.child.exit_code == os.EX_CONFIG


def test_a_worker_is_ready_once_it_is_warm_and_beats_meanwhile(make, tmp_path):
    worker = make("slow_worker", triton_cache_dir=str(tmp_path), warmup="float16:d64")
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "seen").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen == {"list": "float16:d64", "device": "cpu", "triton": False}
    assert worker.heartbeat.started
    assert worker.heartbeat.complaint(time.monotonic()) is None
    assert worker.heartbeat.complaint(time.monotonic() + 600) is not None
    assert worker.child.control.try_recv() is None
    (tmp_path / "go").touch()
    assert isinstance(worker.child.control.recv(PATIENCE_S)[0], Ready)


def test_an_idle_worker_whose_device_fails_ends(make, tmp_path, capfd):
    worker = make("later_wrong_worker", triton_cache_dir=str(tmp_path), prove_s=0.1)
    assert isinstance(worker.child.control.recv(PATIENCE_S)[0], Ready)
    front = worker.attach()
    assert isinstance(front.recv(PATIENCE_S)[0], Hello)
    for number in (1, 2):
        time.sleep(0.7)  # proofs go well
        front.send(attention(number))
        assert isinstance(front.recv(PATIENCE_S)[0], Reply)
    (tmp_path / "go").touch()
    with pytest.raises(ChannelClosed):
        front.recv(PATIENCE_S)
    assert worker.child.join(PATIENCE_S)
    assert worker.child.exit_code == DEVICE_LOST
    assert worker.heartbeat.jobs == ()
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "device failed"
    front.close()


def test_a_device_that_cannot_be_proved_ends_the_worker(make, capfd):
    worker = make("wrong_worker")
    assert worker.child.join(PATIENCE_S)
    assert worker.child.exit_code == os.EX_SOFTWARE
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "start failed"
    assert "off by" in json.loads(line)["error"]

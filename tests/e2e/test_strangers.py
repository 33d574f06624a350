"""Strangers at the side door: those who lie, scribble, hoard or die harm nobody but themselves."""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import local_caller
import msgpack
import numpy as np
import pytest
from local_caller import SEALS, Caller, sealed
from shared_server import KEY, Shared, body, eventually, normal

from flashwire import Client

X = normal(1, 4, 512, 32)
LARGE = body({}, q=X, k=X, v=X)
PACKED = normal(900, 2, 32)
NAMED = "/dev/shm"  # noqa: S108  # where memory with a name would be


@pytest.fixture(autouse=True)
def end(shared: Shared) -> Iterator[None]:
    yield
    shared.end_callers()


@pytest.fixture
def client(shared: Shared) -> Iterator[Client]:
    with shared.client() as connected:
        yield connected


# Liars


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _reopened(flags: int) -> int:
    fd = sealed(LARGE)
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    finally:
        os.close(fd)


def _of(fds: Callable[[], list[int]], **values: Any) -> Callable[[Caller], None]:
    def lie(caller: Caller) -> None:
        sent = fds()
        caller.send(caller.packet(**values), sent)
        for fd in sent:
            os.close(fd)

    return lie


def _raw(packet: bytes) -> Callable[[Caller], None]:
    return lambda caller: caller.send(packet)


def _twice(caller: Caller) -> None:
    fd = sealed(LARGE)
    caller.send(caller.packet(size=len(LARGE)), [fd])
    caller.send(caller.packet(size=len(LARGE)))
    os.close(fd)


def _unread(caller: Caller) -> None:
    caller.send(caller.packet(b"/healthz", "GET"))
    caller.sock.recv(1, socket.MSG_PEEK)
    caller.send(caller.packet(b"/healthz", "GET"))


SIZE = len(LARGE)
FRAME = {"version": 1, "method": "GET", "target": b"/", "headers": [], "body": b"", "size": 0}
LIES: dict[str, Callable[[Caller], None]] = {
    "no memory": _of(list, size=SIZE),
    "a pipe": _of(lambda: [_pipe()], size=SIZE),
    "a file": _of(lambda: [os.open(__file__, os.O_RDONLY)], size=SIZE),
    "unsealed": _of(lambda: [sealed(LARGE, 0)], size=SIZE),
    "may grow": _of(lambda: [sealed(LARGE, SEALS & ~fcntl.F_SEAL_GROW)], size=SIZE),
    "may shrink": _of(lambda: [sealed(LARGE, SEALS & ~fcntl.F_SEAL_SHRINK)], size=SIZE),
    "write only": _of(lambda: [_reopened(os.O_WRONLY)], size=SIZE),
    "too short": _of(lambda: [sealed(LARGE[:-1])], size=SIZE),
    "empty": _of(lambda: [sealed(b"")], size=SIZE),
    "two descriptors": _of(lambda: [sealed(LARGE), sealed(LARGE)], size=SIZE),
    "many descriptors": _of(lambda: [sealed(LARGE) for _ in range(200)], size=SIZE),
    "memory for nothing": _of(lambda: [sealed(LARGE)], body=b"\x80"),
    "no msgpack": _raw(b"\xc1"),
    "a bomb": _raw(b"\xdd\xff\xff\xff\xff"),
    "deep": _raw(b"\x91" * 100_000),
    "no frame": _raw(msgpack.packb({"version": 1})),
    "another version": _raw(msgpack.packb({**FRAME, "version": 2})),
    "a negative size": _raw(msgpack.packb({**FRAME, "size": -1})),
    "a boolean size": _raw(msgpack.packb({**FRAME, "size": True})),
    "a bare header": _raw(msgpack.packb({**FRAME, "headers": [b"a"]})),
    "no path": _raw(msgpack.packb({**FRAME, "target": b"x"})),
    "too long": _raw(b"\0" * 140_000),
    "two at once": _twice,
    "replies left unread": _unread,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_cut_off(shared: Shared, client: Client, lie: str) -> None:
    x = normal(1, 2, 300, 64)
    good = client.attention(x, x, x).out
    front, worker = shared.pids
    before, logged = open_files(front), len(shared.lines("caller cut off"))
    with shared.caller() as caller:
        LIES[lie](caller)
        ending = select.poll()
        ending.register(caller.sock, 0)
        assert ending.poll(20_000)  # the end of it
    eventually(lambda: len(shared.lines("caller cut off")) == logged + 1)
    assert shared.lines("caller cut off")[-1]["pid"] == os.getpid()
    eventually(lambda: open_files(front) == before)
    assert (client.attention(x, x, x).out == good).all()
    assert shared.pids == [front, worker]


@pytest.mark.parametrize("kind", ["read only", "sealed against writing"])
def test_memory_that_nobody_may_write_will_do(shared: Shared, kind: str) -> None:
    fd = _reopened(os.O_RDONLY)
    if kind != "read only":
        os.close(fd)
        fd = sealed(LARGE, SEALS | fcntl.F_SEAL_WRITE)
    with shared.caller() as caller:
        caller.send(caller.packet(size=SIZE), [fd])
        os.close(fd)
        got = caller.receive()
    assert got is not None
    assert got[0].status == 200, got[1]


def test_whoever_scribbles_harms_itself_only(shared: Shared, client: Client) -> None:
    """A thread writes over a request, its offsets first of all, while it is read and computed."""
    offsets = np.array([0, 300, 600, 900], np.int64)
    sent = body({}, q=PACKED, k=PACKED, v=PACKED, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    fd = sealed(sent)
    start, done, dice = sent.index(offsets.tobytes()), threading.Event(), random.Random(3)

    def scribble() -> None:
        while not done.is_set():
            os.pwrite(fd, np.array([0, 2**40, -(2**40), 900]).tobytes(), start)
            os.pwrite(fd, dice.randbytes(3), dice.randrange(200))
            os.pwrite(fd, sent, 0)
            time.sleep(0.001)  # some are to be understood, and changed while they are computed

    x = normal(1, 2, 300, 64)
    good, pids, statuses = client.attention(x, x, x).out, shared.pids, []
    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        with shared.caller() as caller:
            for number in range(60):
                caller.send(caller.packet(size=len(sent)), [] if number else [fd])
                got = caller.receive()
                assert got is not None
                statuses.append(got[0].status)
                if number % 6 == 0:
                    assert (client.attention(x, x, x).out == good).all()
    finally:
        done.set()
        scribbler.join()
        os.close(fd)
    assert set(statuses) <= {200, 400, 422}
    assert 200 in statuses
    assert shared.pids == pids


# Bounds


def test_memory_larger_than_a_body_may_be_is_refused(shared: Shared) -> None:
    fd = sealed(LARGE, size=2**25 + 8192)
    with shared.caller() as caller:
        caller.send(caller.packet(size=SIZE), [fd])
        os.close(fd)
        got = caller.receive()
        assert got is not None
        assert (got[0].status, json.loads(got[1])["code"]) == (413, "too_large")
        assert caller.receive() is None


# Those who die


def test_a_caller_who_leaves_is_a_disconnected_one(shared: Shared) -> None:
    slow = normal(1, 8, 1500, 64)
    sent = body({"backend": "reference"}, q=slow, k=slow, v=slow)
    caller = shared.caller()
    fd = sealed(sent)
    caller.send(caller.packet(size=len(sent), headers=((b"x-request-id", b"left"),)), [fd])
    os.close(fd)
    caller.close()

    def logged() -> bool:
        return any(line["request_id"] == "left" for line in shared.lines("request"))

    eventually(logged)
    (line,) = [line for line in shared.lines("request") if line["request_id"] == "left"]
    assert line["code"] == "disconnected"


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def shared_maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:")


def test_callers_killed_mid_request_leave_nothing(shared: Shared) -> None:
    """kill -9, a hundred times, before, while and after they are answered."""
    x = normal(1, 2, 300, 64)
    with shared.client() as client:
        good = client.attention(x, x, x).out
    eventually(lambda: shared.metric("flashwire_local_connections") == 0)
    pids, shm = shared.pids, sorted(os.listdir(NAMED))

    def state() -> list[int]:
        return [count(pid) for pid in pids for count in (open_files, shared_maps)]

    before, big = state(), normal(1, 2, 1000, 64)
    killer = subprocess.Popen(
        [sys.executable, local_caller.__file__, shared.path, "100"],
        stdin=subprocess.PIPE,
        env={**os.environ, "CALLER_KEY": KEY},
    )
    assert killer.stdin is not None
    killer.stdin.write(body({}, q=big, k=big, v=big))
    killer.stdin.close()
    answered = 0
    with shared.client() as unharmed:
        while killer.poll() is None:
            assert (unharmed.attention(x, x, x).out == good).all()
            answered += 1
    assert killer.returncode == 0
    assert answered > 10
    eventually(lambda: shared.metric("flashwire_local_connections") == 0)
    assert shared.metric("flashwire_shared_memory_bytes") == 0

    eventually(lambda: all(now <= then for now, then in zip(state(), before, strict=True)))
    assert sorted(os.listdir(NAMED)) == shm
    assert shared.pids == pids
    shown = "descriptors and memfd maps of front end and worker, before and after:"
    print(f"kill -9 x 100: {answered} good requests; {shown} {before} {state()}")

"""Callers who leave: while their request waits, and while it is computed."""

from __future__ import annotations

import re
import socket
import struct
import time
from typing import Any

import numpy as np

from flashwire import wire

PATIENCE_S = 60.0
ABORT = struct.pack("ii", 1, 0)  # of SO_LINGER: closing resets the connection


def long_request(**options: Any) -> bytes:
    """A message that takes a second or more to compute, and far less to send."""
    x = np.zeros((20_000, 1), np.float32)
    tensor = wire.Header("float32", x.shape), memoryview(x.tobytes())
    return wire.encode(options, dict.fromkeys("qkv", tensor))


def send(server: Any, message: bytes) -> socket.socket:
    """A request whose reply is not read yet."""
    sock = socket.create_connection((server.host, server.port), PATIENCE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    head = (
        f"POST /attention HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.key}\r\n"
        f"content-length: {len(message)}\r\n\r\n"
    )
    sock.sendall(head.encode() + message)
    return sock


def status(sock: socket.socket) -> int:
    with sock, sock.makefile("rb") as reply:
        return int(reply.readline().split()[1])


def answered(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        sock.settimeout(PATIENCE_S)


def metric(server: Any, name: str) -> float:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", server.http.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_who_leaves_while_waiting_gives_up_the_place(narrow: Any) -> None:
    """One is computed, one waits, a third is refused; the second leaves, and a third may wait."""
    message = long_request()
    first, second = send(narrow, message), None
    for _ in range(100):  # until one of ours waits: the first is computed then
        second = send(narrow, message)
        time.sleep(0.05)
        if not answered(second):
            break
        second.close()
    assert second is not None
    third = send(narrow, message)
    assert status(third) == 429
    second.close()
    for _ in range(100):
        third = send(narrow, message)
        time.sleep(0.02)
        if not answered(third):
            break
        third.close()
    assert not answered(first), "it has to be computed for longer than all this takes"
    assert [status(first), status(third)] == [200, 200]
    narrow.check_unharmed()


def test_who_leaves_while_it_is_computed_leaves_nothing(server: Any) -> None:
    """The answer is thrown away, and the forward that it should have saved, too."""
    server.check_unharmed()
    before = metric(server, "flashwire_residual_bytes")
    sock = send(server, long_request(save_for_backward=True))
    time.sleep(0.2)
    assert not answered(sock)
    sock.close()
    server.check_unharmed()  # after it, in the same queue
    assert metric(server, "flashwire_residual_bytes") <= before

"""A caller that shares memory with the server, without any of the client's manners.

As a program: `local_caller.py PATH COUNT` takes a request's body from stdin, and COUNT times has a
child send it and kills the child with SIGKILL, sooner or later on its way.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from flashwire.local.frames import MAX_PACKET, SUFFIX, Reply, Request, decode_reply, encode

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed(body: bytes, seals: int = SEALS, size: int | None = None) -> int:
    """A memfd with this body in it."""
    fd = os.memfd_create("caller", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(body) if size is None else size)
    os.pwrite(fd, body, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Caller:
    """A connection to the side socket. What it sends need not make sense."""

    def __init__(self, path: str, key: str = "") -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        try:
            self.sock.connect(path + SUFFIX)
        except BaseException:
            self.sock.close()
            raise
        self.headers = [(b"content-type", b"application/msgpack")]
        if key:
            self.headers.append((b"authorization", b"Bearer " + key.encode()))

    def packet(
        self, target: bytes = b"/attention", method: str = "POST", **values: object
    ) -> bytes:
        more = tuple(values.pop("headers", ()))
        values["headers"] = (*self.headers, *more)
        return encode(Request(method=method, target=target, **values))

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Of these descriptors those below 0 stay out."""
        sent = array.array("i", fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)] if fds else []
        self.sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[Reply, bytes] | None:
        """The reply and its body, None when there is none and the connection has ended."""
        try:
            packet, fds, _, _ = socket.recv_fds(self.sock, MAX_PACKET, 1)
        except ConnectionResetError:
            return None
        if not packet:
            return None
        reply = decode_reply(packet)
        body = reply.body
        if fds:
            body = os.pread(fds[0], reply.size, 0)
            os.close(fds[0])
        return reply, body

    def ask(self, body: bytes, target: bytes = b"/attention") -> tuple[Reply, bytes] | None:
        """Send a body in memory of its own, and receive the reply."""
        fd = sealed(body)
        try:
            self.send(self.packet(target, size=len(body)), [fd])
        finally:
            os.close(fd)
        return self.receive()

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _die_on_the_way(path: str, key: str, body: bytes, number: int) -> None:
    """In a child. It says by its exit from the pipe how far it is; the parent kills it."""
    with contextlib.suppress(OSError):
        caller = Caller(path, key)
        if number % 4:
            caller.send(caller.packet(size=len(body)), [sealed(body)])
        if number % 4 == 3:  # answered, and nobody reads it
            caller.sock.recv(1, socket.MSG_PEEK)
    os.write(1, b".")
    signal.pause()


def main(path: str, count: int, key: str) -> None:
    body = sys.stdin.buffer.read()
    for number in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writing, 1)
            try:
                _die_on_the_way(path, key, body, number)
            finally:
                os._exit(0)
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        time.sleep(0.001 * (number % 7))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), os.environ.get("CALLER_KEY", ""))

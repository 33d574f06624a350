"""The same bytes over a bare socket: what no service can beat.

    python -m wiring.raw [PATH]

listens on loopback, or on a unix socket, and prints where. A caller sends two sizes and then as
many bytes as the first says; it is sent as many as the second. Buffers are used again, so that no
page is new.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

_SIZES = struct.Struct("<QQ")
_BUFFER = 256 * 2**20


class Caller:
    """One connection to such a process. `address` is a port of this machine, or a path."""

    def __init__(self, address: int | str) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.connect(address if isinstance(address, str) else ("127.0.0.1", address))
        _undelayed(self._socket)
        self._buffer = memoryview(bytearray(_BUFFER))

    def exchange(self, up: int, down: int) -> None:
        self._socket.sendall(_SIZES.pack(up, down))
        self._socket.sendall(self._buffer[:up])
        fill(self._socket, self._buffer[:down])

    def close(self) -> None:
        self._socket.close()


def fill(sock: socket.socket, target: memoryview) -> None:
    """Receive until it is full. Raises EOFError."""
    at = 0
    while at < len(target):
        got = sock.recv_into(target[at:])
        if not got:
            raise EOFError
        at += got


def serve(listener: socket.socket) -> None:
    """Callers one after the other, for ever."""
    buffer = memoryview(bytearray(_BUFFER))
    sizes = memoryview(bytearray(_SIZES.size))
    while True:
        caller, _ = listener.accept()
        _undelayed(caller)
        with caller, contextlib.suppress(EOFError, ConnectionError):
            while True:
                fill(caller, sizes)
                up, down = _SIZES.unpack(sizes)
                fill(caller, buffer[:up])
                caller.sendall(buffer[:down])


def _undelayed(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main(arguments: list[str]) -> None:
    listener = socket.socket(socket.AF_UNIX if arguments else socket.AF_INET)
    listener.bind(arguments[0] if arguments else ("127.0.0.1", 0))
    listener.listen()
    where = arguments[0] if arguments else listener.getsockname()[1]
    print(f"listening on {where}", flush=True)
    serve(listener)


if __name__ == "__main__":
    main(sys.argv[1:])

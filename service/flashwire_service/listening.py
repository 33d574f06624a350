"""The socket that the service listens on, and what is said when there can be none."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

BACKLOG = 1024
_ADDRESS_ERRORS = {
    errno.EADDRINUSE: (os.EX_UNAVAILABLE, "is in use"),
    errno.EACCES: (os.EX_NOPERM, "needs a privilege that this user lacks"),
}
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as ::1 where there is no IPv6


class Fatal(Exception):
    """The service cannot go on: one line for the operator, and the exit code."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(line)
        self.code = code


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on the first of the host's addresses that this machine has.

    Raises Fatal.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise Fatal(os.EX_NOHOST, f"cannot listen on {host}: {e.strerror}") from e
    for number, (family, kind, proto, _, address) in enumerate(found, start=1):
        try:
            return _bound(socket.socket(family, kind, proto), address)
        except OSError as e:
            if number < len(found) and e.errno in _NOT_HERE:
                continue
            code, why = _ADDRESS_ERRORS.get(e.errno or 0, (os.EX_NOHOST, f"{e.strerror}"))
            raise Fatal(code, f"cannot listen: port {port} of {host} {why}") from e
    raise Fatal(os.EX_NOHOST, f"cannot listen on {host}: it has no address")


def _bound(sock: socket.socket, address: tuple[Any, ...]) -> socket.socket:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def url(listener: socket.socket, *, tls: bool = False) -> str:
    """Where to reach a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"

"""A TCP relay that counts what passes, and delivers it as late as a network would."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Self

_CHUNK = 1 << 16


class Relay:
    """Between callers, who find it at 127.0.0.1:`port`, and `target`.

    delay   seconds that every piece takes, each way; any number of pieces are under way at once
    up      bytes that callers have sent so far; `down`: bytes that were sent to them
    """

    def __init__(self, target: tuple[str, int], delay: float = 0.0) -> None:
        self.target, self.delay = target, delay
        self.up = self.down = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections, and wait until nothing runs any more."""
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):  # its other side was faster
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()

    def _start(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed
                return
            served = socket.create_connection(self.target)
            for end in (caller, served):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends += [caller, served]
            for source, sink, up in ((caller, served, True), (served, caller, False)):
                pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                self._start(self._take, source, pieces, up)
                self._start(self._give, sink, pieces)

    def _take(
        self, source: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]], up: bool
    ) -> None:
        piece = b"at first"
        while piece:
            try:
                piece = source.recv(_CHUNK)
            except OSError:  # reset, or closed by us
                piece = b""
            if up:
                self.up += len(piece)
            else:
                self.down += len(piece)
            pieces.put((time.monotonic() + self.delay, piece))

    def _give(self, sink: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            due, piece = pieces.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with contextlib.suppress(OSError):  # nobody takes it any more
                if piece:
                    sink.sendall(piece)
                else:
                    sink.shutdown(socket.SHUT_WR)
            if not piece:
                return

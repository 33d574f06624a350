"""Log lines: one JSON object a line on stderr, written whole.

Whoever reads stderr may stop: then a write to its full pipe blocks, and whoever writes would hang
with it, an event loop or the supervisor. So lines wait for a thread that writes them. Those that
find no room are dropped, counted, and told of by the next line that finds some. Standard library
only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import threading
import time
from collections import deque
from typing import Any

from flashwire_service.meter import LOG_LINES_DROPPED, Meter

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_MOST_BYTES = 2**20  # of lines that wait
_FLUSH_S = 0.5
_GATHER_S = 0.01


class Lines:
    """Lines on their way to a descriptor. May be used from several threads."""

    def __init__(self, fd: int, most_bytes: int = _MOST_BYTES) -> None:
        self._fd = fd
        self._most = most_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of those that wait, and of the one that is being written
        self._changed = threading.Condition()
        self._started = False

    def put(self, line: bytes) -> bool:
        """Have it written soon; false when there is no room for it. Never blocks."""
        with self._changed:
            if self._bytes + len(line) > self._most:
                return False
            self._lines.append(line)
            self._bytes += len(line)
            if not self._started:
                self._started = self._start()
            self._changed.notify_all()
        return True

    def _start(self) -> bool:
        """False when there is no memory for a thread: the next line tries again."""
        try:
            threading.Thread(target=self._write, name="log", daemon=True).start()
        except RuntimeError:
            return False
        atexit.register(self.flush)
        return True

    def flush(self, timeout: float = _FLUSH_S) -> None:
        """Wait until all is written, but no longer than so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, timeout)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
            time.sleep(_GATHER_S)  # or each line would interrupt whoever computes or serves
            with self._changed:
                piece = self._next_piece()
            while piece:
                with contextlib.suppress(
                    OSError
                ):  # whoever read it is gone: that ends nothing else
                    os.write(self._fd, piece)
                with self._changed:
                    self._bytes -= len(piece)
                    piece = self._next_piece()
            with self._changed:
                self._changed.notify_all()

    def _next_piece(self) -> bytes:
        """Whole lines that are written as one: those of several processes do not mix."""
        size = 0
        lines: list[bytes] = []
        while self._lines and (not lines or size + len(self._lines[0]) <= select.PIPE_BUF):
            size += len(self._lines[0])
            lines.append(self._lines.popleft())
        return b"".join(lines)


_stderr = Lines(2)
_encode = json.JSONEncoder(default=str).encode


def say(line: str) -> None:
    """A plain line on stderr, behind those of the log."""
    _stderr.put(f"{line}\n".encode(errors="backslashreplace"))


def flush() -> None:
    """To be called before os._exit."""
    _stderr.flush()


class Log:
    """The log of one process. Never give it tensors, keys or bodies."""

    def __init__(self, process: str, level: str = "info", lines: Lines = _stderr) -> None:
        self._process = process
        self._threshold = _LEVELS[level]
        self._lines = lines
        self._dropped = 0  # since the last line that was not
        self._meter: Meter | None = None

    def count_on(self, meter: Meter) -> None:
        """Count lines that are dropped."""
        meter.add(LOG_LINES_DROPPED, 0)
        self._meter = meter

    def forward_logging(self) -> None:
        """Take what libraries warn of through `logging` and `warnings`, without tracebacks."""
        logging.getLogger().addHandler(_Forward(self))
        logging.captureWarnings(True)

    def debug(self, event: str, **fields: Any) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if _LEVELS[level] < self._threshold:
            return
        if self._dropped and self._put("warning", "lines dropped", {"lines": self._dropped}):
            self._dropped = 0
        if not self._put(level, event, fields):
            self._dropped += 1
            if self._meter is not None:
                self._meter.add(LOG_LINES_DROPPED)

    def _put(self, level: str, event: str, fields: dict[str, Any]) -> bool:
        now = time.time()
        stamp = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        )
        line = {"time": stamp, "level": level, "process": self._process, "event": event, **fields}
        return self._lines.put((_encode(line) + "\n").encode())


class _Forward(logging.Handler):
    """Warnings of libraries as lines of our log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warning("library", logger=record.name, message=record.getMessage())

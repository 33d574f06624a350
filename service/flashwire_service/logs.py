"""Log lines: one JSON object a line on stderr, written whole."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Log:
    """The log of one process. Never give it tensors, keys or bodies."""

    def __init__(self, process: str, level: str = "info") -> None:
        self._process = process
        self._threshold = _LEVELS[level]

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
        now = time.time()
        stamp = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        )
        line = {"time": stamp, "level": level, "process": self._process, "event": event, **fields}
        with contextlib.suppress(OSError):  # whoever read the log is gone: that ends nothing else
            # One write: lines of several processes do not mix.
            os.write(2, (json.dumps(line, default=str) + "\n").encode())

"""A service under load: `flashwire-serve` as its own process and session."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

from load import processes

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_START_S = 180.0
_END_S = 60.0


class Service:
    """A running service of so many workers and fronts; `with` ends it."""

    def __init__(self, *flags: str, workers: int = 1, fronts: int = 1, **environment: str) -> None:
        self.workers, self.fronts = workers, fronts
        self._directory = tempfile.TemporaryDirectory(prefix="flashwire-load-")
        self._stderr = Path(self._directory.name) / "stderr"
        command = [sys.executable, "-m", "flashwire_service", "--port", "0", "--device", "cpu"]
        command += ["--workers", str(workers), "--frontends", str(fronts), *flags]
        with self._stderr.open("wb") as stderr:
            self._popen = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
                env={**os.environ, **environment}, preexec_fn=_end_with_this_process,
            )  # fmt: skip
        assert self._popen.stdout is not None
        said = self._popen.stdout.readline()
        found = re.search(r"http://([^:/\s]+):(\d+)", said)
        if not found:
            raise RuntimeError(f"no address in {said!r}: {self.log()}")
        self.host, self.port = found[1], int(found[2])

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._popen.pid

    def log(self) -> str:
        return self._stderr.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The log, line by line; what is no line of it (a warning, a traceback) as "raw"."""
        return [_parsed(line) for line in self.log().splitlines()]

    def pids(self, role: str) -> list[int]:
        return [p.pid for p in processes.family(self.pid) if p.role == role]

    def ready_pids(self, role: str) -> list[int]:
        """Of the living processes of a role, those that have said that they are ready."""
        said = {event["pid"] for event in self.events() if event["event"] == "ready"}
        return [pid for pid in self.pids(role) if pid in said]

    def workers_ready(self) -> int:
        """As a front end sees it; 0 also when none answers."""
        url = f"http://{self.host}:{self.port}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return int(json.load(reply)["workers"])
        except (OSError, urllib.error.URLError):
            return 0

    @property
    def whole(self) -> bool:
        """Whether all processes are there and ready."""
        fronts, workers = (len(self.ready_pids(role)) for role in ("front", "worker"))
        there = (workers, fronts) == (self.workers, self.fronts)
        return there and self.workers_ready() == self.workers

    def wait_whole(self) -> None:
        end = time.monotonic() + _START_S
        while not self.whole:
            if time.monotonic() > end or self._popen.poll() is not None:
                raise TimeoutError(f"the service does not become whole: {self.log()[-4000:]}")
            time.sleep(0.1)

    def terminate(self) -> None:
        self._popen.send_signal(signal.SIGTERM)

    def wait(self) -> int | None:
        """The exit status; None when it does not end."""
        try:
            return self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None

    def left_behind(self) -> list[int]:
        """Processes that outlive it. The kernel may need a moment to bury them."""
        end = time.monotonic() + 5
        while (found := processes.of_session(self.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def __enter__(self) -> Service:
        # Whoever ends this process by SIGTERM, as `timeout` does, ends the service with it.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(10)
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._directory.cleanup()


def _end_with_this_process() -> None:
    """In the child: SIGTERM when its parent is gone, be it by a SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _parsed(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
        event["at"] = datetime.fromisoformat(event["time"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return {"event": "raw", "line": line}
    return dict(event)

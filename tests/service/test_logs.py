"""The log: whole lines, and nobody who waits for whoever reads them."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashwire_service.logs import Lines, Log
from flashwire_service.meter import LOG_LINES_DROPPED, Meter

PAGE = 4096
PATIENCE_S = 20.0


class Pipe:
    """A pipe with room for one page, which nobody reads until asked to."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PAGE)

    def fill(self) -> None:
        os.write(self.writer, b"\n" * PAGE)

    def read(self, count: int) -> list[dict[str, Any]]:
        """The next lines that are not empty."""
        with open(os.dup(self.reader), "rb", buffering=0) as file:
            lines = (line for line in iter(file.readline, b"") if line.strip())
            return [json.loads(next(lines)) for _ in range(count)]

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_lines_that_nobody_reads_are_dropped_counted_and_told_of(pipe: Pipe) -> None:
    meter = Meter()
    lines = Lines(pipe.writer, most_bytes=600)
    log = Log("front-0", "info", lines)
    log.count_on(meter)
    pipe.fill()
    for number in range(20):
        log.info("request", number=number)
    dropped = int(meter.value(LOG_LINES_DROPPED))
    assert 12 < dropped < 20
    kept = pipe.read(20 - dropped)
    assert [line["number"] for line in kept] == list(range(20 - dropped))
    lines.flush(PATIENCE_S)
    log.info("request", number=20)
    told, last = pipe.read(2)
    assert (told["event"], told["lines"]) == ("lines dropped", dropped)
    assert last["number"] == 20
    log.info("request", number=21)
    assert pipe.read(1)[0]["number"] == 21


def test_flush_waits_for_a_reader_but_not_for_ever(pipe: Pipe) -> None:
    lines = Lines(pipe.writer)
    pipe.fill()
    lines.put(b'{"a": 1}\n')
    lines.flush(0.05)
    reading = threading.Timer(0.05, lambda: pipe.read(1))
    reading.start()
    lines.flush(PATIENCE_S)
    reading.join()
    assert lines._bytes == 0


def test_a_reader_that_is_gone_ends_nothing(pipe: Pipe) -> None:
    lines = Lines(pipe.writer)
    os.close(pipe.reader)
    for _ in range(3):
        assert lines.put(b"{}\n")
        lines.flush(PATIENCE_S)
    assert lines._bytes == 0
    pipe.reader = os.open(os.devnull, os.O_RDONLY)


def test_warnings_of_libraries_are_lines(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    log = Log("worker-0", "info", Lines(pipe.writer))
    log.forward_logging()
    logging.getLogger("asyncio").error("something %s", "failed")
    logging.getLogger("py.warnings").warning("old")
    logging.getLogger("chatter").info("unasked for")
    first, second = pipe.read(2)
    assert (first["event"], first["logger"]) == ("library", "asyncio")
    assert first["message"] == "something failed"
    assert second["logger"] == "py.warnings"


SERVE = """
import sys
from flashwire_service import supervisor
from flashwire_service.settings import Settings
supervisor.WORKER, supervisor.FRONT = "stub_worker", "stub_front"
sys.exit(supervisor.run(Settings(port=0, log_level="debug")))
"""


def test_a_service_whose_log_nobody_reads_serves_and_ends(pipe: Pipe) -> None:
    pipe.fill()
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdout=subprocess.PIPE,
        stderr=pipe.writer,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            while True:
                with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
                    connection.sendall(b"hello")
                    if json.loads(connection.makefile().read())["workers"]:
                        break
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_no_memory_for_the_writing_thread_is_nobodys_error(monkeypatch):
    """Who logs may be computing: the line waits, and the next one tries again."""
    read, write = os.pipe()
    lines = Lines(write)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert lines.put(b"one\n")
    assert lines.put(b"two\n")
    lines.flush(10)
    assert os.read(read, 100) == b"one\ntwo\n"
    os.close(read)
    os.close(write)

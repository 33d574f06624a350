"""Real servers: `flashwire-serve` as its own process, reached over a real socket."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from shared_server import FLAGS, KEY, Shared

from flashwire import Client
from flashwire.local.frames import SUFFIX

START_S = 60.0
PROGRAM = ("-m", "flashwire_service")
SMALL: dict[str, Any] = {"q": [[1, 0]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "scale": 1.0}
SMALL_OUT = [[1.5378828427399903, 2.5378828427399903]]  # p = e/(e+1), by hand


class Server:
    """A running `flashwire-serve`. `log` is everything it wrote to stderr so far.

    ca       file of the certificate to trust, where it speaks TLS
    program  what Python runs
    """

    def __init__(
        self,
        directory: Path,
        environment: dict[str, str],
        *flags: str,
        ca: Path | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._stderr = directory / f"stderr-{time.monotonic_ns()}"
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *program, "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                text=True,
                start_new_session=True,
            )
        self.key = environment.get("FLASHWIRE_API_KEYS", "").partition(",")[0]
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"https?://\S+", line)
        assert found, f"no address in {line!r}; {self.log}"
        self.url = found[0]
        self.host, _, port = self.url.partition("://")[2].partition(":")
        self.port = int(port)
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        self.trust: Any = True if ca is None else ssl.create_default_context(cafile=ca)
        self.http = httpx.Client(base_url=self.url, timeout=60, headers=headers, verify=self.trust)

    @property
    def log(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_ready(self, workers: int = 1) -> None:
        """Until so many workers are ready."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            reply = self.http.get("/readyz")
            if reply.status_code == 200 and reply.json()["workers"] >= workers:
                return
            time.sleep(0.05)
        raise TimeoutError(self.log)

    def worker_pids(self) -> list[int]:
        return [worker["pid"] for worker in self.http.get("/info").json()["workers"]]

    def client(self, **options: Any) -> Client:
        return Client(self.url, api_key=self.key or None, **options)

    def post(self, path: str, **request: Any) -> httpx.Response:
        return self.http.post(path, **request)

    def raw(self, sent: bytes, timeout: float = 10.0) -> bytes:
        """What comes back for these bytes, until the server closes."""
        with socket.create_connection((self.host, self.port), timeout) as sock:
            sock.sendall(sent)
            received = b""
            while piece := sock.recv(65536):
                received += piece
        return received

    def check_unharmed(self) -> None:
        """The next good request is answered rightly."""
        reply = self.post("/attention", json=SMALL)
        assert reply.status_code == 200, reply.text
        assert reply.json()["out"] == [pytest.approx(SMALL_OUT[0], rel=1e-6)]

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        """Whatever is left of it."""
        self.http.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def start(
    directory: Path,
    *flags: str,
    ready: bool = True,
    ca: Path | None = None,
    program: Sequence[str] = PROGRAM,
    **environment: str,
) -> Server:
    """A new server; its caller stops it."""
    variables = {f"FLASHWIRE_{k}": v for k, v in environment.items()}
    server = Server(directory, variables, *flags, ca=ca, program=program)
    if ready:
        try:
            server.wait_ready()
        except BaseException:
            server.kill()
            raise
    return server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as it was. Its settings are the defaults."""
    running = start(tmp_path_factory.mktemp("server"))
    yield running
    assert running.stop() == 0, running.log


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key and small limits: 1 MiB bodies, one place in the queue."""
    running = start(
        tmp_path_factory.mktemp("narrow"),
        "--max-body-bytes", "1MiB", "--queue-requests", "1", "--residual-ttl-s", "0.5",
        "--keep-alive-s", "0.4", "--max-materialise-bytes", "256MiB",
        API_KEYS="first-key,second-key",
    )  # fmt: skip
    yield running
    assert running.stop() == 0, running.log


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A server with keys that callers on this machine may share memory with, and small limits."""
    path = str(tmp_path_factory.mktemp("uds") / "flashwire.sock")
    running = start(tmp_path_factory.mktemp("shared"), *FLAGS, "--uds", path, API_KEYS=KEY)
    yield Shared(running, path)
    assert running.stop() == 0, running.log
    assert not Path(path + SUFFIX).exists()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start servers of a test's own: start_server("--workers", "2", API_KEYS=...)."""
    started: list[Server] = []

    def start_one(*flags: str, **options: Any) -> Server:
        started.append(running := start(tmp_path, *flags, **options))
        return running

    yield start_one
    for running in started:
        running.kill()


@pytest.fixture(scope="session")
def start_in() -> Callable[..., Server]:
    """start_in(directory, *flags): a server that its caller stops."""
    return start


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[Client]:
    with server.client() as connected:
        yield connected

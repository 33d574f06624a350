"""What the examples share: a service of their own, and how a script ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from flashwire import Client
from flashwire.errors import FlashwireError

READY_S, STOP_S = 120.0, 15.0


class ExampleError(Exception):
    """An example cannot go on; the message is for the person at the terminal."""


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what says which service."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="auto", help="of the service: auto, cpu or cuda[:N]")
    parser.add_argument("--url", help="a running server, with FLASHWIRE_API_KEY if it needs one")
    return parser


@contextlib.contextmanager
def connected(args: argparse.Namespace) -> Iterator[tuple[str, Client]]:
    """The address and a client of the service that the arguments name, or of one of our own."""
    service = contextlib.nullcontext(args.url) if args.url else running_service(args.device)
    with service as url, Client(url, api_key=os.environ.get("FLASHWIRE_API_KEY")) as client:
        yield url, client


@contextlib.contextmanager
def running_service(device: str) -> Iterator[str]:
    """The address of a service of our own, ready. However this ends, so does the service."""
    command = [sys.executable, "-m", "flashwire_service"]
    command += ["--host", "127.0.0.1", "--port", "0", "--device", device, "--log-level", "warning"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHWIRE_")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield _wait_until_ready(process, lambda: os.pread(log.fileno(), 2**20, 0).decode())
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], said: Callable[[], str]) -> str:
    """The service's address, once /readyz answers 200. `said` returns what it has printed."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ExampleError(f"the service ended with status {process.returncode}:\n{said()}")
        address = re.search(r"^flashwire: listening on (http://\S+)$", said(), re.MULTILINE)
        if address:
            with Client(address[1]) as client:
                if client.ready():
                    return address[1]
        time.sleep(0.1)
    raise ExampleError(f"the service was not ready within {READY_S:.0f} s:\n{said()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate, wait, kill. A second Ctrl-C cuts the wait short, and nothing else."""
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    finally:
        process.kill()
        process.wait()


def exit_status(work: Callable[[Console], int]) -> int:
    """What `work` returns; failures and Ctrl-C as one line each."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    console = Console()
    try:
        return work(console)
    except (ExampleError, FlashwireError) as e:
        if interrupted.is_set():  # Python drops what is raised in a finalizer; the service stopped
            return _interrupted(console)
        console.print(f"{type(e).__name__}: {e}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return _interrupted(console)


def _interrupted(console: Console) -> int:
    console.print("interrupted; the service is stopped")
    return 130

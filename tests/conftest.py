"""What every test runs under, and what tests of several folders need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# Read when torch is loaded. Waiting threads that spin would take the cores from the servers that
# tests start, and from whatever else the machine does; a worker of the service sets the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Certificate:
    """A fresh certificate for 127.0.0.1, signed by itself: its files, made with openssl."""

    def __init__(self, directory: Path, name: str) -> None:
        self.cert, self.key = directory / f"{name}.crt", directory / f"{name}.key"
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        subprocess.run(
            ["openssl", "req", "-x509", *curve, "-nodes", "-days", "2", "-subj", f"/CN={name}",
             "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
             "-keyout", str(self.key), "-out", str(self.cert)],
            check=True,
            capture_output=True,
        )  # fmt: skip

    @property
    def flags(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.cert), "--tls-key", str(self.key)


@pytest.fixture
def make_certificate(tmp_path: Path) -> Callable[[str], Certificate]:
    """make_certificate(NAME): a certificate that nobody trusts yet."""
    return lambda name: Certificate(tmp_path, name)

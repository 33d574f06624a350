"""TLS of the front ends: a certificate and its key from files, read again on request.

TLS 1.2 and 1.3, with the ciphers that Python's and OpenSSL's builders hold safe. Standard library.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Iterator


class TLSError(ValueError):
    """A certificate and key that cannot be used. The text names the file."""


def mistakes(cert: str, key: str) -> Iterator[tuple[str, str]]:
    """What is wrong with these two paths ("" is none), each with the flag that it concerns."""
    whole = True
    for flag, path, other in (("--tls-cert", cert, "--tls-key"), ("--tls-key", key, "--tls-cert")):
        said = _unreadable(path) if path else f"is missing, and {other} is given"
        if said:
            whole = False
            yield flag, said
    if whole:
        try:
            context(cert, key)
        except TLSError as e:
            yield "--tls-cert", str(e)


def warnings(key: str) -> Iterator[str]:
    """What is wrong with who may read the private key, though it can be used."""
    if os.stat(key).st_mode & stat.S_IROTH:
        yield f"{key} is a private key, and every user may read it: chmod 600"


def context(cert: str, key: str) -> ssl.SSLContext:
    """A context for servers. Raises TLSError."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    try:
        made.load_cert_chain(cert, key, password=_no_passphrase)
    except ssl.SSLError as e:
        reason = (e.reason or "it is no PEM").replace("_", " ").lower()
        raise TLSError(f"{cert} and {key} are no certificate and its key: {reason}") from None
    except OSError as e:
        raise TLSError(f"{cert} or {key} cannot be read: {e.strerror}") from None
    return made


def _no_passphrase() -> str:
    """Without this, OpenSSL would ask whoever sits at the terminal."""
    raise TLSError("the private key is encrypted: give it without a passphrase")


def _unreadable(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return None if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else f"{path} is no file"
    except OSError as e:
        return f"{path} cannot be read: {e.strerror}"


class Certificate:
    """The certificate in use. `context` is the one to listen with, for good; each handshake gets
    what the last successful `reload` read.
    """

    def __init__(self, cert: str, key: str) -> None:
        """Raises TLSError."""
        self._paths = cert, key
        self._current = self.context = context(cert, key)
        self.context.sni_callback = self._choose  # called for callers that name no host, too

    def reload(self) -> None:
        """Use the files as they are now, from the next connection on. Raises TLSError, and then
        everything stays as it was.
        """
        self._current = context(*self._paths)

    def _choose(self, handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        handshake.context = self._current

"""A unix socket that the service listens on, and its file."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Self

from flashwire.local.frames import SUFFIX
from flashwire_service.listening import BACKLOG, Fatal

MAX_PATH = 107 - len(SUFFIX)  # bytes, of sun_path: another socket may lie beside this one
_PROBE_S = 1.0


def parse_path(value: str) -> str:
    """An absolute path that a socket can have. Raises ValueError."""
    path = os.path.abspath(value)
    if not value or len(os.fsencode(path)) > MAX_PATH:
        raise ValueError(f"must be a path of 1 to {MAX_PATH} bytes, got {value!r}")
    return path


def parse_mode(value: str) -> int:
    """Permissions in octal, as for chmod. Raises ValueError."""
    try:
        mode = int(value, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise ValueError(f"must be permissions in octal, such as 0660, got {value!r}")
    return mode


class SocketFile:
    """A listening socket at a path, for whoever the mode lets in. `close` removes the file.

    A file that a service which is gone has left there makes room. Raises Fatal where a service
    still listens, where the file is no socket, and where there can be none.
    """

    def __init__(self, path: str, mode: int, kind: int = socket.SOCK_STREAM) -> None:
        self._path = Path(path)
        self.socket = socket.socket(socket.AF_UNIX, kind)
        try:
            self._make_room()
            before = os.umask(0o777 & ~mode)  # never, not for a moment, open to others
            try:
                self.socket.bind(path)
            finally:
                os.umask(before)
            self._identity = _identity(self._path)
            self.socket.listen(BACKLOG)
            self.socket.setblocking(False)
        except OSError as e:
            self.socket.close()
            code = os.EX_NOPERM if isinstance(e, PermissionError) else os.EX_CANTCREAT
            raise Fatal(code, f"cannot listen on {path}: {e.strerror}") from e
        except Fatal:
            self.socket.close()
            raise

    def _make_room(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                raise Fatal(os.EX_CANTCREAT, f"cannot listen: {self._path} is there, and no socket")
            with socket.socket(socket.AF_UNIX, self.socket.type) as probe:
                probe.settimeout(_PROBE_S)
                try:
                    probe.connect(str(self._path))
                except ConnectionRefusedError:
                    self._path.unlink()
                    return
            raise Fatal(os.EX_UNAVAILABLE, f"cannot listen: {self._path} is in use")

    def close(self) -> None:
        """Nobody new comes. Another service's socket, should one be there by now, stays."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:
                self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(path: Path) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino

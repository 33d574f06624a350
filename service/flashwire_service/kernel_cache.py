"""The directory in which Triton keeps what it has compiled. No torch here."""

from __future__ import annotations

import os


def parse(value: str) -> str:
    """The absolute path of a directory that can be used. Raises ValueError with why it cannot.

    It is made where it is not there: what cannot be used is known before anything starts.
    """
    if not value:
        raise ValueError("must not be empty")
    directory = os.path.abspath(value)
    if why_not := unusable(directory):
        raise ValueError(f"{directory} {why_not}")
    return directory


def unusable(directory: str) -> str | None:
    """Why compiled kernels cannot be kept there, or None. Makes the directory."""
    try:
        os.makedirs(directory, exist_ok=True)
        flags = os.statvfs(directory).f_flag
    except OSError as e:
        return f"cannot be made or read: {e.strerror}"
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return f"cannot be written to by user {os.geteuid()}"
    if flags & os.ST_NOEXEC:
        return "is mounted noexec, and Triton loads what it compiles from there"
    return None

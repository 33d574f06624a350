"""Values as text, as flags, variables and files give them: parsers that say what is wrong.

Each takes a text and returns the value, or raises ValueError with a sentence about the value alone;
who names the setting is the caller.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_UNITS = {"": 1, "k": 2**10, "ki": 2**10, "m": 2**20, "mi": 2**20, "g": 2**30, "gi": 2**30}


def text(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def flag(value: str) -> bool:
    word = value.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"must be true or false, got {value!r}")


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
            raise ValueError(f"must be an integer, got {value!r}")
        if not low <= int(value) <= high:
            raise ValueError(f"must be from {low} to {high}, got {value.strip()}")
        return int(value)

    return parse


def size(low: int, high: int | None = None) -> Callable[[str], int]:
    """A number of bytes, perhaps with a unit: 67108864, 64MiB, 64m."""

    def parse(value: str) -> int:
        match = re.fullmatch(r"\s*([0-9]{1,18})\s*([kmg]i?)?b?\s*", value.lower())
        if not match:
            raise ValueError(f"must be a number of bytes such as 67108864 or 64MiB, got {value!r}")
        found = int(match[1]) * _UNITS[match[2] or ""]
        if found < low:
            raise ValueError(f"must be at least {low} bytes, got {value.strip()}")
        if high is not None and found > high:
            raise ValueError(f"must be at most {high} bytes, got {value.strip()}")
        return found

    return parse


def size_text(size: int) -> str:
    """A size with the largest unit that divides it: 64MiB."""
    for unit in ("GiB", "MiB", "KiB"):
        factor = _UNITS[unit[:2].lower()]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def seconds(low: float) -> Callable[[str], float]:
    def parse(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            raise ValueError(f"must be a number of seconds, got {value!r}") from None
        if not math.isfinite(found) or found < low:
            raise ValueError(f"must be at least {low:g} seconds, got {value.strip()}")
        return found

    return parse


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, got {value!r}")
        return value.lower()

    return parse

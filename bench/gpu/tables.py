"""The tables of shipped configurations as text: a line is replaced, all else stays as it is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashwire_kernels.fused import config
from flashwire_kernels.fused.config import Config, Key, configured

PASSES = config.PASSES
SHIPPED = Path(config.__file__).parent / "shipped"

_ALWAYS = ("m", "n", "warps", "stages")
_WIDTHS = {2: "half", 4: "single"}


def line(key: Key, chosen: Config) -> str:
    """The line of a configuration; of its fields, those that every line has, and what differs from
    the defaults.
    """
    return f"{_name(key)} = {_value(chosen)}"


def _value(value: Config | int | None) -> str:
    if not isinstance(value, Config):
        return str(value).lower()
    given = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.name in _ALWAYS or getattr(value, field.name) != field.default
    }
    return "{ " + ", ".join(f"{name} = {_value(v)}" for name, v in given.items()) + " }"


def replaced(text: str, found: Mapping[Key, Config]) -> str:
    """A pass's table with other configurations for some keys; a comment behind a line stays.

    Raises KeyError for a key that has no line.
    """
    lines, section, left = [], "", dict(found)
    for old in text.splitlines():
        section = match[1] if (match := re.match(r"\[(.+)\]", old)) else section
        key = next((k for k in left if _section(k) == section and _is_of(old, k)), None)
        if key is None:
            lines.append(old)
            continue
        lines.append(line(key, left.pop(key)) + _after(old))
    if left:
        raise KeyError(next(iter(left)))
    return "\n".join(lines) + "\n"


def rewrite(found: Iterable[tuple[list[Any], dict[str, Any]]], folder: Path) -> list[Path]:
    """Write into `folder` the shipped tables with what was found, (key, configuration) as JSON has
    them; the files.
    """
    chosen = {Key(*key): configured(fields) for key, fields in found}
    written = []
    for kind in dict.fromkeys(key.kind for key in chosen):
        own = {key: c for key, c in chosen.items() if key.kind == kind}
        text = replaced((SHIPPED / f"{kind}.toml").read_text(), own)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind}.toml").write_text(text)
        written.append(folder / f"{kind}.toml")
    return written


def _after(old: str) -> str:
    """A comment behind a line's last brace, and the space before it."""
    value, mark, comment = old.partition("#")
    return value.rpartition("}")[2] + mark + comment


def _section(key: Key) -> str:
    return f"{key.family}.{_WIDTHS[key.item_size]}"


def _name(key: Key) -> str:
    return f"d{key.dim}{'_modified' if key.modified else ''}"


def _is_of(text: str, key: Key) -> bool:
    return text.partition("=")[0].strip() == _name(key)

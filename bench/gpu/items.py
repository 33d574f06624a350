"""What a part consists of: items that run on their own, each giving a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whoever only reads rows needs no torch
    from gpu.place import Place

Row = dict[str, Any]
"""JSON: "item", "status" and "seconds", and what the part has to say."""

PASS, FAIL, ERROR, SKIPPED, MISSED = "pass", "fail", "error", "skipped", "not reached"

MINE = "flashwire"
PEERS = ("flash", "cudnn", "flex")
"""Of speed: what is measured, and PyTorch's own beside it."""


@dataclass(frozen=True)
class Item:
    """run(place) gives the row's own members, with its status.

    alone  one after the other, in the first process: it takes much memory
    """

    name: str
    run: Callable[[Place], Row]
    alone: bool = False

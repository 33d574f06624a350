"""Compiles all that will be measured, in several processes, while others check results."""

from __future__ import annotations

from functools import partial
from typing import Any

from gpu import decode, speed
from gpu.items import MINE, Item
from gpu.place import Place

_LENGTHS = (512, 16384)
"""Our own kernels differ only in whether keys are many enough to be searched for infinities."""


def items(place: Place, options: dict[str, Any]) -> list[Item]:
    """options["parts"] are those to compile for."""
    found = []
    if "speed" in options["parts"]:
        every = speed.shapes(place.dry)
        own = [s for s in every if place.dry or s.length in _LENGTHS]
        flex = [s for s in every if s.length in speed.FLEX_LENGTHS]
        jobs = [(s, MINE) for s in own] + [(s, "flex") for s in flex]
        found += [Item(f"{name} {s}", partial(speed.warm, s, name)) for s, name in jobs]
    if "decode" in options["parts"]:
        found += [
            Item(f"decode {s}", partial(decode.warm, s)) for s in decode.shapes(place.dry)[-1:]
        ]
    return found

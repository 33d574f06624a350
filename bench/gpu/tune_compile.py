"""Compiles candidates, and predicts from their machine code how fast each can be."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashwire_kernels.fused import backend
from flashwire_kernels.fused.config import Config, Key
from gpu.items import PASS, Item, Row
from gpu.place import Place
from gpu.trials import Trial, configured, keys, launch, shapes, tried

_WIDTHS = {2: "half", 4: "single"}


def items(place: Place, options: dict[str, Any]) -> list[Item]:
    """An item per key and candidate."""
    arch = architecture(place)
    return [
        Item(item_name(key, c), partial(_compile, arch, key, c))
        for key in keys(arch, options)
        for c in tried(key, options["most"])
    ]


def architecture(place: Place) -> str:
    """The device's; in a dry run, one that has shipped configurations."""
    return "sm_90" if place.dry else backend._arch(place.device)


def key_name(key: Key) -> str:
    """As it is called in rows."""
    modified = ", modified" if key.modified else ""
    return f"{key.kind}, {key.family} {_WIDTHS[key.item_size]} d{key.dim}{modified}"


def item_name(key: Key, c: Config) -> str:
    """Of a candidate."""
    return f"{key_name(key)}: {config_text(c)}"


def config_text(c: Config) -> str:
    """m x n, warps, stages, and what is particular."""
    text = f"{c.m}x{c.n} w{c.warps} s{c.stages}"
    return text + (f" split {c.split}" if c.split else "") + (" d" if c.descriptors else "")


def _compile(arch: str, key: Key, chosen: Config, place: Place) -> Row:
    row: Row = {"status": PASS}
    if not place.dry:  # where kernels are interpreted, there is nothing to compile
        row |= _predicted(arch, key, chosen)
    for shape in shapes(key, place.dry):
        calls, _ = Trial(key, shape, place).prepare(chosen)
        launch(calls)
    return row


def _predicted(arch: str, key: Key, chosen: Config) -> Row:
    """By bench/audit.py: TFLOP/s if nothing of a tile overlaps, and if everything does."""
    from auditing import cases, figures

    width = _WIDTHS[key.item_size]
    audited = arch if arch in cases.ARCHES else key.family
    variants = (
        v
        for v in cases.VARIANTS
        if key.kind in v.kinds
        and v.modified == key.modified
        and width in v.widths
        and key.dim in v.dims
    )
    case = cases.Case(audited, key.kind, width, key.dim, next(variants))
    with configured(key, chosen):
        kernel = figures.measure(case)[-1]
    found: Row = {"registers": kernel.registers, "spilled": kernel.spilled, "shared": kernel.shared}
    if kernel.loop is not None:
        bound = kernel.loop.bound
        found["predicted"] = {"serial": bound.serial, "parallel": bound.parallel}
    return found

"""A process that runs items of one part: `python -m gpu.child PART`, started by runner.py."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

import interpreted
from flashwire_kernels.fused import support
from gpu.items import ERROR, Item, Row
from gpu.place import Gpu, Host, Place, versions
from gpu.runner import BROKEN, NO_DEVICE, claim, write_about, write_row

PARTS = {
    "conformance": "gpu.conformance",
    "compile": "gpu.compilation",
    "speed": "gpu.speed",
    "decode": "gpu.decode",
    "tune-compile": "gpu.tune_compile",
    "tune": "gpu.tune_time",
}
"""Modules with items(place, options) -> list[Item]."""


def find_place(dry: bool) -> Place:
    """The device, ready to compute. Ends the process where there is none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for repeatable references
    if dry:
        np.seterr(all="ignore")  # infinities are how hidden pairs are computed
        patch = interpreted.Lasting()
        interpreted.interpret_bfloat16(patch)
        interpreted.interpret_helpers_once(patch)
        patch.setattr(support, "DEVICES", frozenset({"cuda", "cpu"}))
        return Host()
    if not torch.cuda.is_available():
        sys.exit(NO_DEVICE)
    torch.cuda.init()
    return Gpu()


def attempt(item: Item, place: Place) -> tuple[Row, bool]:
    """The row of an item, and whether its device still answers."""
    began = time.monotonic()
    try:
        row, usable = item.run(place), True
        place.synchronise()
    except Exception as raised:
        traceback.print_exc()
        row, usable = {"status": ERROR, "error": f"{type(raised).__name__}: {raised}"[:2000]}, True
        try:
            place.synchronise()
        except Exception:
            usable = False
    return row | {"seconds": round(time.monotonic() - began, 2)}, usable


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    parser.add_argument("--dry-run", action="store_true")
    chosen = parser.parse_args()
    began, parent = time.monotonic(), os.getppid()
    place = find_place(chosen.dry_run)
    items: list[Item] = importlib.import_module(PARTS[chosen.part]).items(place, chosen.options)
    facts = place.facts() | versions()
    write_about(chosen.folder, {"items": [item.name for item in items], "facts": facts})
    for index, item in enumerate(items):
        if time.monotonic() - began > chosen.seconds or os.getppid() != parent:
            break
        if (item.alone and chosen.number) or not claim(chosen.folder, index):
            continue
        print(f"[{time.monotonic() - began:6.1f} s] {item.name}", flush=True)
        row, usable = attempt(item, place)
        write_row(chosen.folder, {"index": index, "item": item.name, **row})
        if not usable:
            sys.exit(BROKEN)


if __name__ == "__main__":
    main()

"""Does the device compute what the contract says? Each item a case, or a property of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch

from flashwire_kernels.budget import expectations
from flashwire_kernels.check import check
from flashwire_kernels.fused import config
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.testing import Call, Case, resolve_tensors
from gpu import cases, extremes
from gpu.items import FAIL, PASS, SKIPPED, Item, Row
from gpu.place import Place
from gpu.results import BACKEND, Tensors, call_of, conforms, results, same_bits, spent

_TF32_BITS = 13
"""What TF32 leaves out of float32's mantissa."""


def items(place: Place, options: dict[str, Any]) -> list[Item]:
    """Everything to check. What takes much memory comes first: it runs beside the rest."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    small = place.dry
    properties: dict[str, tuple[Callable[[Case, Place], Row], list[Case]]] = {
        "reference, device and host": (_same_reference, cases.references(small)),
        "ieee and tf32": (_ieee_and_tf32, cases.singles(small)),
        "descriptors and pointers": (_descriptors_and_pointers, cases.described(small)),
        "anywhere in memory": (_anywhere, cases.repeated(small)),
        "again, beside other work": (_again, cases.repeated(small)),
        "alone and in company": (_company, cases.neighbours(small)),
        "a NaN among keys": (_spoiled_key, cases.spoiled(small)),
        "case": (_case, cases.grid(small)),
    }
    return extremes.items(place) + [
        Item(f"{what}: {case}", partial(check_case, case))
        for what, (check_case, listed) in properties.items()
        for case in listed
    ]


def _case(case: Case, place: Place) -> Row:
    return conforms(call_of(case, place))


def _spoiled_key(case: Case, place: Place) -> Row:
    call = call_of(case, place)
    call.tensors["k"][..., call.tensors["k"].shape[-2] // 3, 1] = torch.nan
    return conforms(call)


def _same_reference(case: Case, place: Place) -> Row:
    """The float64 reference that everything is compared with, here and on the host."""
    here, there = (_expected(call_of(case, place), d) for d in (place.device, torch.device("cpu")))
    off = {n: float((t - there[n]).abs().max() / there[n].abs().max()) for n, t in here.items()}
    return {"status": PASS if max(off.values()) < 1e-11 else FAIL, "relative": off}


def _expected(call: Call, device: torch.device) -> Tensors:
    """What the reference wants, computed on `device`."""
    tensors = {name: t.to(device) for name, t in call.tensors.items()}
    problem = resolve_tensors(call.spec, tensors)
    dlse = None if call.dlse is None else call.dlse.to(device)
    want = expectations(problem, Inputs(**tensors), call.dout.to(device), dlse)
    return {name: e.want.cpu() for name, e in want.items()}


def _ieee_and_tf32(case: Case, place: Place) -> Row:
    """float32 is IEEE unless told otherwise; TF32, when asked for, is what then runs."""
    call = call_of(case, place)
    row = conforms(call)
    if row["status"] != PASS:
        return row
    asked = dataclasses.replace(call, spec=dataclasses.replace(call.spec, precision="tf32"))
    report = check(
        **asked.tensors, spec=asked.spec, dout=asked.dout, dlse=asked.dlse,
        backends=(BACKEND, "reference"),
    )  # fmt: skip
    coarse = {name: spent(c) for name, c in report.tensors.items()}
    row |= {"tf32_of_budget": coarse}
    if max(coarse.values()) > 2**_TF32_BITS:
        row |= {"status": FAIL, "error": "tf32 is off by more than its mantissa is shorter"}
    elif not place.dry and max(coarse.values()) < 2:
        row |= {"status": FAIL, "error": "tf32 was asked for and did not run"}
    return row


def _descriptors_and_pointers(case: Case, place: Place) -> Row:
    capability = (9, 0) if place.dry else torch.cuda.get_device_capability(place.device)
    if torch.version.hip or capability < (9, 0):
        return {"status": SKIPPED, "why": "the device has no tensor descriptors"}
    call = call_of(case, place)
    found = []
    for descriptors in (True, False):
        with _configured(descriptors=descriptors):
            found.append(results(call))
    return same_bits({"by pointers": (found[0], found[1])})


def _anywhere(case: Case, place: Place) -> Row:
    """Numbers that are not beside each other run in other tiles: right, by other bits perhaps."""
    call = call_of(case, place)
    first = results(call)
    row = same_bits(
        {
            "one entry further on": (first, results(_placed(call, _shifted))),
            "with rows apart": (first, results(_placed(call, _rows_apart))),
        }
    )
    return row if row["status"] != PASS else conforms(_placed(call, _strided))


def _again(case: Case, place: Place) -> Row:
    call = call_of(case, place)
    first = results(call)
    for n in range(2 if place.dry else 50):
        place.keep_busy()
        row = same_bits({f"at repeat {n + 1}": (first, results(call))})
        if row["status"] != PASS:
            return row
    return {"status": PASS}


def _company(case: Case, place: Place) -> Row:
    """The first batch row alone, and among others."""
    call = call_of(case, place)
    t = call.tensors
    alone = dataclasses.replace(
        call,
        tensors=t | {name: t[name][:1] for name in "qkv"},
        dout=call.dout[:1],
        dlse=None if call.dlse is None else call.dlse[:1],
    )
    many = {name: tensor[:1] for name, tensor in results(call).items()}
    return same_bits({"in company": (results(alone), many)})


def _configured(**changes: Any) -> AbstractContextManager[object]:
    """Launch configurations with changes."""
    choose = config.choose

    def changed(*key: Any, **modified: bool) -> config.Config:
        return dataclasses.replace(choose(*key, **modified), **changes)

    return mock.patch.object(config, "choose", changed)


def _placed(call: Call, place_one: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    tensors = {
        name: t if name.startswith("cu_") else place_one(t) for name, t in call.tensors.items()
    }
    dlse = None if call.dlse is None else place_one(call.dlse)
    return dataclasses.replace(call, tensors=tensors, dout=place_one(call.dout), dlse=dlse)


def _shifted(t: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that begins one entry later than memory does."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return memory[1:].view(t.shape).copy_(t)


def _rows_apart(t: torch.Tensor) -> torch.Tensor:
    """A copy whose rows have gaps between them, and begin where whole vectors do."""
    if t.dim() < 3:
        return t.clone()
    width = 16 * (t.shape[-1] // 16 + 1)
    memory = torch.zeros((*t.shape[:-1], width), dtype=t.dtype, device=t.device)
    return memory[..., : t.shape[-1]].copy_(t)


def _strided(t: torch.Tensor) -> torch.Tensor:
    """A copy with gaps after each entry, and its dimensions in reversed order."""
    memory = torch.zeros((*reversed(t.shape), 3), dtype=t.dtype, device=t.device)
    return memory[..., 1].permute(*reversed(range(t.dim()))).copy_(t)

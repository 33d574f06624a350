"""Forward and backward of a described call, and what to compare of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from flashwire_kernels import api
from flashwire_kernels.check import Comparison, check
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.testing import Call, Case, make
from gpu.items import FAIL, PASS, Row
from gpu.place import Place

BACKEND = "triton"
Tensors = dict[str, torch.Tensor]


def call_of(case: Case, place: Place) -> Call:
    """The call that a case describes, on the device. Offsets stay on the host."""
    call = make(case)
    tensors = {
        name: t if name.startswith("cu_") else t.to(place.device)
        for name, t in call.tensors.items()
    }
    dlse = None if call.dlse is None else call.dlse.to(place.device)
    return dataclasses.replace(call, tensors=tensors, dout=call.dout.to(place.device), dlse=dlse)


def results(call: Call) -> Tensors:
    """Everything that forward and backward give."""
    t = call.tensors
    found = api.forward(**t, spec=call.spec, backend=BACKEND)
    g = api.backward(
        call.dout,
        **t,
        out=found.out,
        lse=found.lse,
        dlse=call.dlse,
        wanted=Wanted(bias="bias" in t, sinks="sinks" in t),
        spec=call.spec,
        backend=BACKEND,
    ).gradients
    named = {field.name: getattr(g, field.name) for field in dataclasses.fields(g)}
    return {"out": found.out, "lse": found.lse} | {n: t for n, t in named.items() if t is not None}


def conforms(call: Call) -> Row:
    """Every result against the float64 reference, computed where the call's tensors are, within
    the budget of the contract. Every entry must be written: memory is full of NaN before.
    """
    with full_of_nan():
        report = check(
            **call.tensors,
            spec=call.spec,
            dout=call.dout,
            dlse=call.dlse,
            backends=(BACKEND, "reference"),
        )
    return judged(report.tensors)


def judged(tensors: Mapping[str, Comparison]) -> Row:
    """A row that says how far each tensor is off, in budgets."""
    off = {name: c for name, c in tensors.items() if not c.passed}
    row: Row = {
        "status": FAIL if off else PASS,
        "of_budget": {n: spent(c) for n, c in tensors.items()},
    }
    if off:
        row["error"] = "; ".join(
            f"{name} off by {c.max_abs:.3g}, allowed {c.budget:.3g}, at {c.worst}"
            for name, c in off.items()
        )
    return row


def spent(c: Comparison) -> float:
    """What part of its budget a tensor is off."""
    return c.max_abs / c.budget if c.budget else (0.0 if c.max_abs == 0 else float("inf"))


def differing(some: Tensors, others: Tensors) -> list[str]:
    """Names of tensors that differ in any bit."""
    return [name for name, t in some.items() if not torch.equal(_bits(t), _bits(others[name]))]


def same_bits(pairs: Mapping[str, tuple[Tensors, Tensors]]) -> Row:
    """A row that passes when both of each pair have the same bits."""
    wrong = [
        f"{what}: {', '.join(names)}"
        for what, (some, others) in pairs.items()
        if (names := differing(some, others))
    ]
    return (
        {"status": FAIL, "error": "other bits " + "; ".join(wrong)} if wrong else {"status": PASS}
    )


@contextmanager
def full_of_nan() -> Iterator[None]:
    """What torch.empty gives is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _bits(t: torch.Tensor) -> torch.Tensor:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(whole)

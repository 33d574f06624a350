"""POST /attention/plan: what a request would cost, from its headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flashwire import wire
from flashwire_kernels import plan as plans
from flashwire_kernels import support
from flashwire_kernels.errors import InvalidAttention
from flashwire_kernels.validation import Problem
from flashwire_service.errors import Refusal
from flashwire_service.front import checks, models
from flashwire_service.front.message import Message

_EXACT_BELOW = 2**40  # bytes; beyond, a message is not laid out piece by piece to be counted


def plan(
    options: models.PlanOptions,
    problem: Problem,
    message: Message,
    workers: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """The reply's members. Raises Refusal (invalid) for what cannot be counted."""
    facts = next(iter(workers.values()), {})
    backend, skipped = _choose(options.backend, problem, facts.get("device", "cpu"))
    try:
        counted = plans.plan(
            problem, sram_elements=options.sram_elements, gflops=facts.get("gflops")
        )
        extra = support.extra_bytes(backend, problem, backward=False)
        reply = {
            "backend": backend,
            "skipped": skipped,
            **dataclasses.asdict(counted),
            "peak_bytes": counted.bytes_min + extra,
            "wire_bytes_up": _up(options, problem, message),
            "wire_bytes_down": _down(options, problem, message),
        }
    except InvalidAttention as exc:
        raise checks.refusal(exc.violations) from None
    except OverflowError:
        raise _uncountable() from None
    if reply["peak_bytes"] >= 2**64 or reply["flops_bwd"] >= 2**64:
        raise _uncountable()
    return reply


def _uncountable() -> Refusal:
    reason = "q: the shapes are too large to count"
    return Refusal("invalid", reason, field="q", reasons=(reason,))


def _choose(
    asked: str, problem: Problem, device: str
) -> tuple[str, list[dict[str, str | list[str]]]]:
    """The backend that would run, and the faster ones that would not.

    Raises Refusal (unsupported_backend) for a named one that cannot.
    """
    if asked != "auto":
        if reasons := support.reasons(asked, problem, device):
            detail = f"backend {asked!r} cannot run this request: " + "; ".join(reasons)
            raise Refusal("unsupported_backend", detail, field="backend", reasons=reasons)
        return asked, []
    skipped: list[dict[str, str | list[str]]] = []
    for backend in support.BACKENDS:
        reasons = support.reasons(backend, problem, device)
        if not reasons:
            return backend, skipped
        skipped.append({"backend": backend, "reasons": list(reasons)})
    raise Refusal("unsupported_backend", "no backend can run this request", field="backend")


def _up(options: models.PlanOptions, problem: Problem, message: Message) -> int:
    """Bytes of the canonical request: options, headers, payloads."""
    given = checks.job_options(options)
    given.pop("sram_elements", None)
    tensors = {name: ref.header for name, ref in message.tensors.items()}
    for name in "kv":
        tensors.setdefault(name, tensors["q"])
    for name in wire.OFFSETS:
        if problem.packed:
            tensors[name] = wire.Header("int64", (problem.batch + 1,))
    return _size(given, tensors)


def _down(options: models.PlanOptions, problem: Problem, message: Message) -> int:
    """Bytes of the reply's tensors; its meta adds a few hundred."""
    q = message.tensors["q"]
    tensors = {"out": wire.Header(q.dtype, (*q.shape[:-1], problem.dim_v))}
    if options.return_lse:
        tensors["lse"] = wire.Header(problem.lse_dtype, checks.lse_shape(problem))
    return _size({}, tensors)


def _size(options: Mapping[str, Any], tensors: Mapping[str, wire.Header]) -> int:
    nbytes = sum(header.nbytes for header in tensors.values())
    return wire.lay_out(options, tensors).size if nbytes < _EXACT_BELOW else nbytes

"""A message against the rules of its route: what a worker may take for granted of a job.

Everything that options and headers can tell is settled here; values are the worker's to judge.
Every violation is named, the first as `field`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from flashwire import wire
from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import TENSORS, Problem, check_size, resolve
from flashwire_service.errors import Refusal
from flashwire_service.front import models
from flashwire_service.front.message import Message

Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True, slots=True)
class Checked:
    """Options for the job, defaults left out, and the attention they describe."""

    options: dict[str, Any]
    problem: Problem


def attention(message: Message) -> Checked:
    """POST /attention. A dropout without a seed gets one. Raises Refusal (invalid)."""
    wrong: list[Violation] = []
    options = models.parse(models.AttentionOptions, message.options, wire.ATTENTION, wrong)
    problem = _problem(options, message.options, message.headers(), wrong)
    if options is None or problem is None:
        raise refusal(wrong)
    return Checked(job_options(options), problem)


def backward(message: Message) -> Checked:
    """POST /attention/backward without a residual. Raises Refusal (invalid)."""
    wrong: list[Violation] = []
    given, headers = dict(message.options), message.headers()
    given.pop("residual", None)  # it is null, or this would not be called
    if given.pop("release", False):
        wrong.append(Violation("release", "frees a residual, and none is named"))
    options = models.parse(models.BackwardOptions, given, wire.BACKWARD, wrong)
    problem = _problem(options, given, headers, wrong, draw_seed=False)
    if "dout" not in headers:
        wrong.append(Violation("dout", "is missing"))
    for name, other in (("out", "lse"), ("lse", "out")):
        if name in headers and other not in headers:
            wrong.append(Violation(other, f"is missing: {name} is given, and needs both or none"))
    if options is not None:
        for name, asked in (("bias", options.bias_grad), ("sinks", options.sinks_grad)):
            if asked and name not in headers:
                wrong.append(Violation(f"{name}_grad", f"there is no {name} to differentiate"))
    if problem is not None:
        _check_results(problem, headers, headers, wrong)
    if options is None or problem is None or wrong:
        raise refusal(wrong)
    return Checked(job_options(options), problem)


def backward_by_residual(message: Message) -> dict[str, Any]:
    """POST /attention/backward by residual: the options of the job. Raises Refusal (invalid)."""
    wrong: list[Violation] = []
    given, headers = dict(message.options), message.headers()
    kept = [name for name in models.Options.model_fields if name in given and name != "version"]
    for name in [*(n for n in kept if n != "backend"), *(h for h in headers if h in _KEPT)]:
        given.pop(name, None)
        wrong.append(Violation(name, "is kept with the residual, and must not be given again"))
    options = models.parse(models.ResidualOptions, given, wire.BACKWARD, wrong)
    if "dout" not in headers:
        wrong.append(Violation("dout", "is missing"))
    for name, header in headers.items():  # only the worker knows what shape it must have
        wrong += check_size(name, header)
    if options is None or wrong:
        raise refusal(wrong)
    return job_options(options)


_KEPT = (*TENSORS, "out", "lse")


def check(message: Message) -> Checked:
    """POST /attention/check. Raises Refusal (invalid)."""
    wrong: list[Violation] = []
    options = models.parse(models.CheckOptions, message.options, wire.CHECK, wrong)
    request = None if options is None else options.request
    headers = message.headers("request.")
    given = message.options.get("request")
    given = given if isinstance(given, dict) else {}
    problem = _problem(request, given, headers, wrong, prefix="request.")
    mine = message.headers("mine.")
    if any(name in mine for name in ("dq", "dk", "dv")) and "dout" not in message.headers():
        wrong.append(Violation("dout", "is missing: mine has gradients to compare"))
    if problem is not None:
        _check_results(problem, headers, mine, wrong, prefix="mine.")
        _check_results(problem, headers, message.headers(), wrong)
    if options is None or request is None or problem is None or wrong:
        raise refusal(wrong)
    return Checked(job_options(options) | {"request": job_options(request)}, problem)


def plan(message: Message) -> tuple[models.PlanOptions, Problem]:
    """POST /attention/plan, its offsets' values known. Raises Refusal (invalid)."""
    wrong: list[Violation] = []
    given, headers = dict(message.options), message.headers()
    wrong += [
        Violation(name, "must be a plain list of integers: a plan needs its values")
        for name in wire.OFFSETS
        if name in headers or not _is_integers(given.get(name, []))
    ]
    if wrong:
        raise refusal(wrong)
    offsets = {name: given.pop(name) for name in wire.OFFSETS if name in given}
    for name, values in offsets.items():
        headers[name] = TensorHeader("int64", (len(values),))
    if "q" in headers:
        headers = {"k": headers["q"], "v": headers["q"]} | headers
    options = models.parse(models.PlanOptions, given, wire.PLAN, wrong)
    problem = _problem(options, given, headers, wrong)
    if options is None or problem is None or wrong:
        raise refusal(wrong)
    if problem.packed:
        try:
            problem = problem.with_offsets(*(offsets[name] for name in wire.OFFSETS))
        except InvalidAttention as exc:
            raise refusal(exc.violations) from None
    return options, problem


def refusal(violations: Sequence[Violation]) -> Refusal:
    """Every violation as one refusal."""
    reasons = list(dict.fromkeys(str(v) for v in violations))
    return Refusal("invalid", "; ".join(reasons), field=violations[0].field, reasons=reasons)


def job_options(options: BaseModel) -> dict[str, Any]:
    """Options as they go into a job: names and forms of the wire, defaults left out."""
    return options.model_dump(exclude_defaults=True, exclude_none=True, exclude={"version"})


def _is_integers(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int for v in values)


def _problem(
    options: models.Options | None,
    given: Mapping[str, Any],
    headers: Headers,
    wrong: list[Violation],
    *,
    prefix: str = "",
    draw_seed: bool = True,
) -> Problem | None:
    """The attention that options and headers describe; None and what is wrong otherwise.

    Headers are checked when the options are wrong too, so that one reply names everything; the
    layout `given` is what their shapes depend on.
    """
    try:
        if options is not None:
            if draw_seed and options.dropout and options.dropout.seed is None:
                options.dropout.seed = secrets.randbits(64)
            spec = _spec(options)
        else:
            spec = AttentionSpec(layout=given.get("layout"))
    except InvalidAttention as exc:
        if options is not None:
            wrong += [Violation(prefix + v.field, v.message) for v in exc.violations]
        return None
    try:
        problem = resolve(spec, {name: headers[name] for name in TENSORS if name in headers})
    except InvalidAttention as exc:
        wrong += [Violation(prefix + v.field, v.message) for v in exc.violations]
        return None
    return None if options is None else problem


def _spec(options: models.Options) -> AttentionSpec:
    """Raises InvalidAttention."""
    window = options.window
    return AttentionSpec(
        scale=options.scale,
        causal=options.causal,
        causal_align=options.causal_align,
        window=None if window is None else (window[0], window[1]),
        softcap=options.softcap,
        dropout_p=options.dropout.p if options.dropout else 0.0,
        dropout_seed=options.dropout.seed if options.dropout else None,
        layout=options.layout,
        precision=options.precision,
    )


def _check_results(
    problem: Problem, inputs: Headers, results: Headers, wrong: list[Violation], prefix: str = ""
) -> None:
    """Results and their gradients must have the shapes and dtypes that attention gives them."""
    q, k, v = (inputs[name] for name in "qkv")
    out = TensorHeader(problem.dtype, (*q.shape[:-1], problem.dim_v))
    lse = TensorHeader(problem.lse_dtype, lse_shape(problem))
    expected = {"out": out, "lse": lse, "dout": out, "dlse": lse, "dq": q, "dk": k, "dv": v}
    for name, want in expected.items():
        got = results.get(name)
        if got is None:
            continue
        if got.dtype != want.dtype:
            message = f"dtype must be {want.dtype}, got {got.dtype}"
            wrong.append(Violation(prefix + name, message))
        if got.shape != want.shape:
            message = f"must have shape {list(want.shape)}, got {list(got.shape)}"
            wrong.append(Violation(prefix + name, message))


def lse_shape(problem: Problem) -> tuple[int, ...]:
    if problem.packed:
        return problem.tokens_q, problem.heads_q
    return (problem.batch, problem.heads_q, problem.len_q)[4 - problem.rank :]

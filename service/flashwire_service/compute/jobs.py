"""One function per route: a job's options and tensors -> kernels -> the body of its reply."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashwire_kernels import api
from flashwire_kernels.check import check
from flashwire_kernels.errors import InvalidAttention, Violation
from flashwire_kernels.tensors import Backward, Forward, Skipped
from flashwire_kernels.types import AttentionSpec
from flashwire_service import meter as meters
from flashwire_service.compute import device as devices
from flashwire_service.compute import packed, replies
from flashwire_service.compute.arrays import tensor_at
from flashwire_service.compute.failures import (
    DeviceLost,
    failure_of,
    is_fatal,
    is_out_of_memory,
)
from flashwire_service.compute.intake import Ticket
from flashwire_service.compute.options import OF_BACKWARD, backend_of, spec_of, wanted_of
from flashwire_service.compute.residuals import Residuals, Saved
from flashwire_service.compute.room import Room, forward_bytes, total_bytes
from flashwire_service.compute.threads import Threads
from flashwire_service.ipc.frames import Failure, Job, Reply
from flashwire_service.ipc.memory import Memory
from flashwire_service.logs import Log
from flashwire_service.meter import Meter
from flashwire_service.settings import Settings

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Answer:
    """What goes back to the front end. `close` it once it is sent."""

    frame: Reply | Failure
    memory: Memory | None = None
    residual: str | None = None

    @property
    def fd(self) -> int | None:
        return None if self.memory is None else self.memory.fd

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a route has computed. `meta` lacks only the timings; None where nothing was computed."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    meta: dict[str, Any] | None = None
    residual: str | None = None  # made by this job
    used: str | None = None  # to be released once the reply is made


class Jobs:
    """Computes jobs on one device, one or a few at a time, and holds the residuals."""

    def __init__(
        self,
        device: torch.device,
        settings: Settings,
        worker: int,
        log: Log,
        meter: Meter | None = None,
    ) -> None:
        self._device = device
        self._log = log
        self._meter = meter or Meter()
        self._worker = str(worker)
        self._residuals = Residuals(
            signing_key=settings.signing_key,
            worker=worker,
            ttl_s=settings.residual_ttl_s,
            max_bytes=settings.residual_bytes,
        )
        self._room = Room(device, settings.max_materialise_bytes)
        self._threads = Threads()

    def sweep(self) -> None:
        """Free residuals whose time is up."""
        self._residuals.sweep()

    def discard(self, ticket: Ticket, answer: Answer) -> None:
        """Nobody waits for this answer, so nobody will ever know its residual."""
        if answer.residual is not None:
            self._residuals.release(answer.residual, ticket.job.owner)

    def measure(self) -> None:
        """Show what is held, and the memory of a GPU."""
        held = self._residuals
        self._meter.set(meters.RESIDUALS, len(held), self._worker)
        self._meter.set(meters.RESIDUAL_BYTES, held.held_bytes, self._worker)
        if (memory := devices.allocated_bytes(self._device)) is not None:
            now, peak = memory
            self._meter.set(meters.DEVICE_MEMORY, now, self._worker)
            self._meter.set(meters.DEVICE_MEMORY_PEAK, peak, self._worker)

    def run(self, ticket: Ticket) -> Answer:
        """Compute a job. What goes wrong is an answer too, but for a device that can compute no
        other job: raises DeviceLost.
        """
        try:
            return self._computed(ticket)
        except Exception as e:
            failure, ran_out = self._failure(ticket.job, e), is_out_of_memory(e)
        if ran_out:  # only here, with the traceback, does the job let go of its tensors
            devices.release_cached(self._device)
        return Answer(failure)

    def _computed(self, ticket: Ticket) -> Answer:
        job, started = ticket.job, time.monotonic()
        self._room.require_inputs(job)
        tensors = self._tensors(ticket)
        with self._threads.fitting(tensors):
            outcome = _ROUTES[job.route](self, job, tensors)
        answer = self._reply(job, outcome, started)
        if job.route in ("attention", "backward"):
            self._meter.observe(meters.BATCH, 1)
        return answer

    def _tensors(self, ticket: Ticket) -> Tensors:
        """A job's tensors, on the device."""
        started, body = time.monotonic(), ticket.body
        slots = ticket.job.tensors.items()
        tensors = {name: tensor_at(body, slot).to(self._device) for name, slot in slots}
        self._meter.observe(meters.TRANSFER, time.monotonic() - started, "in")
        return tensors

    def together(self, tickets: Sequence[Ticket]) -> list[Answer] | None:
        """Compute jobs that batching.py says may be computed together, and answer each. None when
        that fails: then each by itself finds out what is wrong. Raises DeviceLost.
        """
        try:
            return self._computed_together(tickets)
        except Exception as e:
            self._failure(tickets[0].job, e)
            ran_out = is_out_of_memory(e)
        if ran_out:  # only here, see `run`
            devices.release_cached(self._device)
        return None

    def _computed_together(self, tickets: Sequence[Ticket]) -> list[Answer] | None:
        started = time.monotonic()
        given = [(ticket.job, self._tensors(ticket)) for ticket in tickets]
        with self._threads.fitting(*(tensors for _, tensors in given)):
            found = packed.compute(given)
        if found is None:
            return None
        devices.synchronize(self._device)
        done = time.monotonic()
        self._meter.observe(meters.BATCH, len(tickets))
        answers = []
        for ticket, ran in zip(tickets, found, strict=True):
            outcome = self._outcome(ticket.job, ran, spec_of(ticket.job.options))
            try:
                answers.append(self._reply(ticket.job, outcome, started, done))
            except Exception as e:
                answers.append(Answer(self._failure(ticket.job, e)))
        return answers

    # Routes

    def attention(self, job: Job, tensors: Tensors) -> Outcome:
        options = job.options
        spec = spec_of(options)
        save = bool(options.get("save_for_backward"))
        backend = backend_of(options)
        result_bytes = forward_bytes(tensors)
        kept_bytes = total_bytes(tensors) + result_bytes if save else 0
        if save:
            self._residuals.require(kept_bytes, job.owner, job.max_residual_bytes)
        limit = self._room.for_backend(job, backend, tensors, result_bytes, kept_bytes)
        forward = api.forward(**tensors, spec=spec, backend=backend, memory_limit=limit)
        outcome = self._outcome(job, forward, spec)
        if save:
            saved = Saved(
                spec=spec,
                tensors={name: _owned(t) for name, t in tensors.items()},
                out=forward.out,
                lse=forward.lse,
                backend=forward.backend,
                skipped=forward.skipped,
            )
            key = self._residuals.keep(saved, job.owner, job.max_residual_bytes)
            outcome.residual = outcome.values["residual"] = key
        return outcome

    def backward(self, job: Job, tensors: Tensors) -> Outcome:
        options = job.options
        own = {name: tensors.pop(name) for name in OF_BACKWARD if name in tensors}
        if "dout" not in own:
            raise InvalidAttention([Violation("dout", "is missing")])
        key = options.get("residual")
        skipped: tuple[Skipped, ...] = ()
        if key is None:
            spec = spec_of(options)
            backend = backend_of(options)
        else:
            saved = self._residuals.get(key, job.owner)
            spec, tensors = saved.spec, dict(saved.tensors)
            own |= {"out": saved.out, "lse": saved.lse}
            backend = options.get("backend") or saved.backend
            skipped = () if options.get("backend") else saved.skipped
        wanted = wanted_of(options, tensors)
        limit = self._room.for_backend(job, backend, tensors, total_bytes(tensors))
        backward = api.backward(
            **own, **tensors, spec=spec, wanted=wanted, backend=backend, memory_limit=limit
        )
        outcome = self._outcome(job, replace(backward, skipped=backward.skipped or skipped), spec)
        outcome.used = key if options.get("release") else None
        return outcome

    def check(self, job: Job, tensors: Tensors) -> Outcome:
        options, spec = job.options, spec_of(job.options.get("request") or {})
        mine = _under("mine.", tensors)
        report = check(
            **_under("request.", tensors),
            dout=tensors.get("dout"),
            backends=tuple(options.get("backends") or ("auto", "reference")),
            mine=mine or None,
            memory_limit=min(self._room.max_materialise, devices.available_bytes(self._device)),
            spec=spec,
        )
        compared = {name: c.to_json() for name, c in report.tensors.items()}
        meta = {
            "backend": report.want if mine else report.got,
            "device": str(self._device),
            "skipped": _skipped(report.skipped),
            "precision": report.precision,
            "got": report.got,
            "want": report.want,
        }
        return Outcome(values={"pass": report.passed, "tensors": compared}, meta=meta)

    def release(self, job: Job, tensors: Tensors) -> Outcome:
        self._residuals.release(job.options["residual"], job.owner)
        return Outcome()

    # What routes share

    def _outcome(self, job: Job, ran: Forward | Backward, spec: AttentionSpec) -> Outcome:
        tensors: dict[str, torch.Tensor | None]
        if isinstance(ran, Forward):
            tensors = {"out": ran.out, "lse": ran.lse if job.options.get("return_lse") else None}
        else:
            g = ran.gradients
            tensors = {"dq": g.dq, "dk": g.dk, "dv": g.dv, "dbias": g.dbias, "dsinks": g.dsinks}
        return Outcome(tensors=tensors, meta=self._meta(ran, spec))

    def _reply(
        self, job: Job, outcome: Outcome, started: float, done: float | None = None
    ) -> Answer:
        """`done` is when it was computed; None: it is waited for."""
        try:
            if done is None:  # launches fail when they run, not when they are made
                devices.synchronize(self._device)
            now = time.monotonic()
            queue_ms, compute_ms = 1000 * (started - job.received), 1000 * ((done or now) - started)
            values = dict(outcome.values)
            if outcome.meta is not None:
                total_ms = queue_ms + compute_ms
                timings = {"queue": queue_ms, "compute": compute_ms, "total": total_ms}
                values["meta"] = {**outcome.meta, "timings_ms": timings}
            body = replies.encode(job.accept, values, outcome.tensors)
            self._meter.observe(meters.TRANSFER, time.monotonic() - now, "out")
        except BaseException:
            if outcome.residual is not None:
                self._residuals.release(outcome.residual, job.owner)
            raise
        if outcome.used is not None:
            self._residuals.release(outcome.used, job.owner)
        backend = outcome.meta["backend"] if outcome.meta else ""
        self._meter.observe(meters.QUEUE_WAIT, queue_ms / 1000)
        self._meter.observe(meters.COMPUTE, compute_ms / 1000, job.route, backend)
        frame = Reply(
            id=job.id,
            size=body.size,
            body=body.inline,
            backend=backend,
            queue_ms=queue_ms,
            compute_ms=compute_ms,
            started=started,
        )
        return Answer(frame, body.memory, outcome.residual)

    def _meta(self, ran: Forward | Backward, spec: AttentionSpec) -> dict[str, Any]:
        return {
            "backend": ran.backend,
            "device": str(self._device),
            "skipped": _skipped(ran.skipped),
            **({"seed": spec.dropout_seed} if spec.dropout_p else {}),
            "precision": ran.precision,
        }

    def _failure(self, job: Job, error: Exception) -> Failure:
        """What an error amounts to. Raises DeviceLost."""
        failure = failure_of(error, job, self._room.max_materialise)
        if failure.code == "internal":
            self._log.error("job failed", route=job.route, error=traceback.format_exc())
            if is_fatal(error) or not devices.answers(self._device):
                raise DeviceLost from error
        return failure


_ROUTES: dict[str, Callable[[Jobs, Job, Tensors], Outcome]] = {
    "attention": Jobs.attention,
    "backward": Jobs.backward,
    "check": Jobs.check,
    "release": Jobs.release,
}


def _under(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors of a map inside the message, by their name in it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _skipped(skipped: Sequence[Skipped]) -> list[dict[str, Any]]:
    return [{"backend": s.backend, "reasons": list(s.reasons)} for s in skipped]


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Not in the request's memory, which goes with the request."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor

"""Which waiting jobs are computed together with the one whose turn it is, and their answers.

Nobody waits for company: only what is in the queue already is taken, up to so many queries and keys
(`batch_tokens`). Results have the bits that each job has alone; where that takes a packed problem
(company.py), each such job is packed even when nobody else is there. What goes wrong together is
found out job by job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flashwire_kernels import api, company
from flashwire_kernels.types import TensorHeader
from flashwire_kernels.validation import OFFSETS, TENSORS, Problem, resolve
from flashwire_service.compute.arrays import tensor_at
from flashwire_service.compute.intake import Intake, Ticket
from flashwire_service.compute.jobs import Answer
from flashwire_service.compute.lines import NOT_ASKED
from flashwire_service.compute.options import OF_BACKWARD, backend_of, spec_of
from flashwire_service.ipc.heartbeat import MOST_JOBS

MOST_BYTES = 64 * 2**20  # of a device, for all together: nobody asks whether so much is there
_ROUTES = ("attention", "backward")
# A saved forward, and one that is read, are one job's own; so are gradients that are sums.
_OF_ONE = ("save_for_backward", "residual", "bias_grad", "sinks_grad")


@dataclass(frozen=True, slots=True)
class Kind:
    """What jobs must share to be computed together, and how many queries and keys this one has."""

    what: Hashable
    tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs to compute now, together if there are several. `packed` when as a packed problem."""

    tickets: Sequence[Ticket]
    packed: bool = False


class Computing(Protocol):
    """What is asked of Jobs; tests stand in for it."""

    def run(self, ticket: Ticket) -> Answer: ...
    def together(self, tickets: Sequence[Ticket]) -> list[Answer] | None: ...


class Batching:
    """Finds company for jobs of one device. With 0 tokens, for none."""

    def __init__(self, device: torch.device, max_tokens: int) -> None:
        self._device = device
        self._max_tokens = max_tokens
        self._always_packed = device.type != "cpu"  # see company.SAME_BITS_DENSE

    def batch(self, first: Ticket, intake: Intake) -> Batch:
        """The job just taken from the queue, and those to be computed with it, taken as well."""
        if not self._max_tokens or not (intake.depth or self._always_packed):
            return Batch([first])
        kind = self._kind(first)
        if kind is None:
            return Batch([first])
        company = [] if first.job.alone else intake.join(self._admits(first, kind))
        return Batch([first, *company], packed=bool(company) or self._always_packed)

    def answered(
        self, batch: Batch, jobs: Computing, mark: Callable[[Sequence[Ticket]], None]
    ) -> Iterator[tuple[Ticket, Answer, float]]:
        """Each job of a batch with its answer and its share of the time, in seconds, as soon as
        there is one. `mark` is told what is about to be computed. Raises DeviceLost.
        """
        started = time.monotonic()
        mark(batch.tickets)
        answers = jobs.together(batch.tickets) if batch.packed else None
        if answers is None and len(batch.tickets) == 1:
            answers = [jobs.run(batch.tickets[0])]
        if answers is None:
            for ticket in batch.tickets:
                yield from self.answered(Batch([ticket], self._always_packed), jobs, mark)
            return
        seconds = time.monotonic() - started
        total = sum(1 + ticket.job.size for ticket in batch.tickets)
        for ticket, answer in zip(batch.tickets, answers, strict=True):
            yield ticket, answer, seconds * (1 + ticket.job.size) / total

    def _admits(self, first: Ticket, kind: Kind) -> Callable[[Ticket], bool]:
        """Whether one more may come, as long as there is room."""
        count, tokens, nbytes = 1, kind.tokens, first.job.device_bytes

        def admits(ticket: Ticket) -> bool:
            nonlocal count, tokens, nbytes
            if count == MOST_JOBS or tokens >= self._max_tokens or ticket.job.alone:
                return False
            other = self._kind(ticket)
            if other is None or other.what != kind.what:
                return False
            if tokens + other.tokens > self._max_tokens:
                return False
            if nbytes + ticket.job.device_bytes > MOST_BYTES:
                return False
            count, tokens, nbytes = (
                count + 1, tokens + other.tokens, nbytes + ticket.job.device_bytes
            )  # fmt: skip
            return True

        return admits

    def _kind(self, ticket: Ticket) -> Kind | None:
        """None for a job that is computed by itself. Found out once."""
        if ticket.kind is NOT_ASKED:
            try:
                ticket.kind = self._find_kind(ticket)
            except Exception:  # whatever is wrong is its answer, once it is computed
                ticket.kind = None
        found = ticket.kind
        return found if isinstance(found, Kind) else None

    def _find_kind(self, ticket: Ticket) -> Kind | None:
        job = ticket.job
        if job.route not in _ROUTES or any(job.options.get(name) for name in _OF_ONE):
            return None
        problem = self._problem(ticket)
        if problem is None or job.device_bytes > MOST_BYTES:
            return None
        tokens = problem.tokens_q + problem.tokens_k
        backend, _ = api.choose(backend_of(job.options), problem, self._device)
        what = company.kind(problem, backend)
        if what is None or tokens > self._max_tokens:
            return None
        given = tuple(name for name in OF_BACKWARD if name in job.tensors)
        return Kind((job.route, given, what), tokens)

    def _problem(self, ticket: Ticket) -> Problem | None:
        """None where there are too many sequences to look at each."""
        slots = ticket.job.tensors
        headers = {n: TensorHeader(s.dtype, s.shape) for n, s in slots.items() if n in TENSORS}
        problem = resolve(spec_of(ticket.job.options), headers)
        if not problem.packed:
            return problem
        if problem.batch > self._max_tokens:
            return None
        body = ticket.body
        return problem.with_offsets(*(tensor_at(body, slots[name]).tolist() for name in OFFSETS))

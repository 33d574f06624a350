"""Company in the queue: who is computed with whom, whose answer is whose, who pays."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from flashwire import wire
from flashwire_kernels import api
from flashwire_service import meter as meters
from flashwire_service.compute.arrays import NAMES, bytes_of, tensor_at
from flashwire_service.compute.batching import MOST_BYTES, Batch, Batching
from flashwire_service.compute.intake import Intake, Ticket
from flashwire_service.compute.jobs import Answer, Jobs
from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.frames import Failure, Job, Reply, TensorSlot
from flashwire_service.ipc.heartbeat import MOST_JOBS
from flashwire_service.logs import Log
from flashwire_service.meter import Meter
from flashwire_service.settings import Settings

CPU = torch.device("cpu")
SCHEMAS = {"attention": wire.ATTENTION, "backward": wire.BACKWARD}
Tensors = dict[str, torch.Tensor]


class Worker:
    """What a worker computes with, without processes."""

    def __init__(self, channel: Channel, tokens: int = 10_000) -> None:
        self.channel = channel
        self.meter = Meter()
        self.intake = Intake(100, 2**30)
        self.batching = Batching(CPU, tokens)
        self.jobs = Jobs(CPU, Settings(), 0, Log("test", "error"), self.meter)
        self.marked: list[list[int]] = []

    def offer(self, number: int, route: str, tensors: Tensors, **fields: Any) -> Job:
        options = fields.pop("options", {})
        payloads = {n: (wire.Header(NAMES[t.dtype], tuple(t.shape)), bytes_of(t))
                    for n, t in tensors.items()}  # fmt: skip
        body = wire.encode(options, payloads)
        refs = wire.decode(body, SCHEMAS[route]).tensors
        slots = {n: TensorSlot(r.dtype, r.shape, r.segments) for n, r in refs.items()}
        now = time.monotonic()
        fields = {"deadline": now + 60, "received": now, **fields}
        job = Job(
            id=number, route=route, options=options, tensors=slots, size=len(body), body=body,
            **fields,
        )  # fmt: skip
        assert not self.intake.offer(Ticket(job, self.channel))
        return job

    def batch(self) -> Batch:
        first = self.intake.take(0)
        assert first is not None
        return self.batching.batch(first, self.intake)

    def ids(self) -> list[int]:
        """Who is computed next, together; as if it had taken a second."""
        batch = self.batch()
        for ticket in batch.tickets:
            self.intake.finish(ticket, 1.0)
        return [ticket.job.id for ticket in batch.tickets]

    def answers(self) -> dict[int, Answer]:
        """Everything in the queue, computed."""
        found: dict[int, Answer] = {}
        while self.intake.depth:
            for ticket, answer, seconds in self.batching.answered(
                self.batch(), self.jobs, self._mark
            ):
                assert seconds > 0
                self.intake.finish(ticket, seconds)
                found[ticket.job.id] = answer
        return found

    def _mark(self, tickets: Sequence[Ticket]) -> None:
        self.marked.append([ticket.job.id for ticket in tickets])

    @property
    def batches(self) -> tuple[float, float]:
        """How many, and the requests in all of them."""
        *counts, total = self.meter._row(meters.BATCH, ())
        return sum(counts), total


@pytest.fixture
def worker() -> Iterator[Worker]:
    ours, theirs = Channel.pair()
    yield Worker(ours)
    ours.close()
    theirs.close()


def qkv(seed: int, *, batch: int = 1, heads: int = 2, len_q: int = 5, len_k: int = 7,
        dtype: torch.dtype = torch.float32) -> Tensors:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    lengths = {"q": len_q, "k": len_k, "v": len_k}
    return {n: torch.randn(batch, heads, n_rows, 8, generator=g).to(dtype)
            for n, n_rows in lengths.items()}  # fmt: skip


def read(answer: Answer) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The values of a good reply, and its tensors' bits with their shapes."""
    assert isinstance(answer.frame, Reply), answer.frame
    raw = bytearray(answer.frame.body or (answer.memory.view if answer.memory else b""))
    answer.close()
    message = wire.decode(raw, wire.REPLY)
    slots = {n: TensorSlot(r.dtype, r.shape, r.segments) for n, r in message.tensors.items()}
    tensors = {n: tensor_at(raw, slot) for n, slot in slots.items()}
    return dict(message.options), {
        n: bytes(bytes_of(t)) + repr((t.dtype, t.shape)).encode() for n, t in tensors.items()
    }


def alone(channel: Channel, route: str, tensors: Tensors, **fields: Any) -> Answer:
    """The answer of a worker that has nobody else."""
    own = Worker(channel, tokens=0)
    own.offer(1, route, tensors, **fields)
    return own.answers()[1]


CAUSAL = {"causal": True, "return_lse": True}
MANY: dict[str, tuple[str, Tensors, dict[str, Any]]] = {
    "one": ("attention", qkv(1), CAUSAL),
    "longer": ("attention", qkv(2, len_q=30, len_k=9), CAUSAL),
    "rows": ("attention", qkv(3, batch=3), {**CAUSAL, "backend": "cpu"}),
    "blhd": ("attention", {n: t.transpose(1, 2).contiguous() for n, t in qkv(4).items()},
             {**CAUSAL, "layout": "blhd"}),
    "flat": ("attention", {n: t[0] for n, t in qkv(5).items()}, {"causal": True}),
    "packed": ("attention",
               {**{n: t[0].transpose(0, 1).contiguous() for n, t in qkv(6).items()},
                "cu_seqlens_q": torch.tensor([0, 2, 5]), "cu_seqlens_k": torch.tensor([0, 7, 7])},
               CAUSAL),
}  # fmt: skip


def test_what_waits_and_agrees_is_computed_at_once(worker: Worker) -> None:
    for number, (route, tensors, options) in enumerate(MANY.values()):
        worker.offer(number, route, tensors, options=options)
    answers = worker.answers()
    assert worker.marked == [[0, 1, 2, 3, 4, 5]]
    assert worker.batches == (1, 6)
    for number, (route, tensors, options) in enumerate(MANY.values()):
        values, got = read(answers[number])
        wanted, want = read(alone(worker.channel, route, tensors, options=options))
        assert answers[number].frame.id == number
        assert got == want
        assert ("lse" in got) == ("return_lse" in options)
        timings = values["meta"].pop("timings_ms")
        del wanted["meta"]["timings_ms"]
        assert values == wanted
        assert timings["total"] == timings["queue"] + timings["compute"]


def test_gradients_are_computed_together_by_what_they_are_given(worker: Worker) -> None:
    def backward(seed: int, *names: str) -> Tensors:
        x = qkv(seed, len_q=4 + seed)
        f = api.forward(**x)
        given = {"dout": torch.ones_like(f.out), "dlse": f.lse * seed, "out": f.out, "lse": f.lse}
        return {**x, **{name: given[name] for name in ("dout", *names)}}

    jobs = [
        backward(0), backward(1, "out", "lse"), backward(2), backward(3, "out", "lse", "dlse"),
        backward(4, "out", "lse"),
    ]  # fmt: skip
    for number, tensors in enumerate(jobs):
        worker.offer(number, "backward", tensors)
    worker.offer(5, "attention", qkv(9))
    answers = worker.answers()
    assert worker.marked == [[0, 2], [1, 4], [3], [5]]
    for number, tensors in enumerate(jobs):
        assert read(answers[number])[1] == read(alone(worker.channel, "backward", tensors))[1]


@pytest.mark.parametrize("options", [
    {"save_for_backward": True}, {"dropout": {"p": 0.5, "seed": 1}}, {"scale": "nonsense"},
    {"backend": "reference"}, {"backend": "triton"}, {"window": 3}], ids=str)  # fmt: skip
def test_what_cannot_be_packed_is_computed_by_itself(
    worker: Worker, options: dict[str, Any]
) -> None:
    for number in range(2):
        worker.offer(number, "attention", qkv(number), options=options)
    answers = worker.answers()
    assert worker.marked == [[0], [1]]
    assert set(answers) == {0, 1}


def test_a_batch_is_bounded(worker: Worker) -> None:
    worker.batching = Batching(CPU, 40)
    sizes = [(5, 5), (10, 11), (3, 7), (4, 6), (20, 21), (19, 21)]
    for number, (len_q, len_k) in enumerate(sizes):
        worker.offer(number, "attention", qkv(1, len_q=len_q, len_k=len_k))
    assert [worker.ids() for _ in range(4)] == [[0, 1], [2, 3], [4], [5]]  # 4 is beyond it itself
    worker.batching = Batching(CPU, 10**6)
    for number in range(MOST_JOBS + 1):
        worker.offer(number, "attention", qkv(1))
    assert worker.ids() == list(range(MOST_JOBS))
    assert worker.ids() == [MOST_JOBS]
    for number in range(3):
        worker.offer(number, "attention", qkv(1), device_bytes=MOST_BYTES // 2)
    assert [worker.ids() for _ in range(2)] == [[0, 1], [2]]
    worker.batching = Batching(CPU, 0)
    for number in range(2):
        worker.offer(number, "attention", qkv(1))
    assert [worker.ids() for _ in range(2)] == [[0], [1]]


def test_many_empty_sequences_are_not_looked_at(worker: Worker) -> None:
    tensors = MANY["packed"][1] | {
        "cu_seqlens_q": torch.tensor([0] * 20_000 + [5]),
        "cu_seqlens_k": torch.tensor([0] * 20_000 + [7]),
    }
    for number in range(2):
        worker.offer(number, "attention", tensors)
    assert [worker.ids() for _ in range(2)] == [[0], [1]]


def test_owners_come_in_turn_and_each_pays_its_share(worker: Worker) -> None:
    worker.batching = Batching(CPU, 12 * 4)
    for number in range(6):
        worker.offer(number, "attention", qkv(1), owner="many")
    for number, owner in ((10, "few"), (11, "few"), (20, "one")):
        worker.offer(number, "attention", qkv(1), owner=owner)
    assert worker.ids() == [0, 10, 20, 1]
    worker.batching = Batching(CPU, 12)  # one by one, who has had least first
    assert [worker.ids()[0] for _ in range(5)] == [11, 2, 3, 4, 5]


def test_a_suspect_is_computed_alone(worker: Worker) -> None:
    for number in range(4):
        worker.offer(number, "attention", qkv(1), alone=number in (0, 2))
    assert [worker.ids() for _ in range(3)] == [[0], [1, 3], [2]]


def test_late_and_cancelled_jobs_take_no_part(worker: Worker) -> None:
    worker.offer(0, "attention", qkv(1))
    worker.offer(1, "attention", qkv(1), deadline=time.monotonic())
    worker.offer(2, "attention", qkv(1))
    worker.offer(3, "attention", qkv(1))
    worker.intake.cancel(worker.channel, 2)
    batch = worker.batch()
    assert [ticket.job.id for ticket in batch.tickets] == [0, 3]
    worker.intake.cancel(worker.channel, 3)  # too late not to compute it
    assert [ticket.abandoned for ticket in batch.tickets] == [False, True]
    worker.intake.drop_channel(worker.channel)
    assert all(ticket.abandoned for ticket in batch.tickets)


def test_an_error_is_its_owners_alone(worker: Worker) -> None:
    x = qkv(1)
    good = {**x, "dout": torch.ones_like(x["v"][:, :, :5])}
    bad = {**x, "dout": torch.ones_like(x["v"])}
    for number, tensors in enumerate((good, bad, good)):
        worker.offer(number, "backward", tensors)
    answers = worker.answers()
    assert worker.marked == [[0, 1, 2], [0], [1], [2]]
    failure = answers[1].frame
    assert isinstance(failure, Failure)
    assert (failure.id, failure.code, failure.field) == (1, "invalid", "dout")
    want = read(alone(worker.channel, "backward", good))[1]
    assert read(answers[0])[1] == read(answers[2])[1] == want


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_is_its_owners_alone(worker: Worker, name: str) -> None:
    good, bad = qkv(1), qkv(2)
    bad[name][0, 0, 0, 0] = math.nan
    for number, tensors in enumerate((good, bad, good)):
        worker.offer(number, "attention", tensors)
    answers = worker.answers()
    for number, tensors in enumerate((good, bad, good)):
        got = read(answers[number])[1]
        assert got == read(alone(worker.channel, "attention", tensors))[1]


def test_where_memory_runs_out_together_each_is_tried_by_itself(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("flashwire_service.compute.packed.compute", full)
    for number in range(2):
        worker.offer(number, "attention", qkv(number))
    answers = worker.answers()
    assert worker.marked == [[0, 1], [0], [1]]
    for number in range(2):
        assert read(answers[number])[1] == read(alone(worker.channel, "attention", qkv(number)))[1]


def test_a_reply_that_cannot_be_made_is_one_jobs_failure(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, calls = worker.jobs._reply, []

    def reply(job: Job, *more: Any) -> Answer:
        calls.append(job.id)
        if job.id == 1:
            raise MemoryError
        return encode(job, *more)

    monkeypatch.setattr(worker.jobs, "_reply", reply)
    for number in range(3):
        worker.offer(number, "attention", qkv(number))
    answers = worker.answers()
    assert calls == [0, 1, 2]
    failure = answers[1].frame
    assert isinstance(failure, Failure)
    assert (failure.id, failure.code) == (1, "not_enough_memory")
    assert all(isinstance(answers[number].frame, Reply) for number in (0, 2))


def test_on_a_gpu_every_job_that_might_have_company_is_packed(worker: Worker) -> None:
    """Its kernels for dense tensors are others, perhaps with other bits."""
    worker.batching = Batching(torch.device("cuda", 0), 1000)
    worker.offer(0, "attention", qkv(1))
    worker.offer(1, "attention", qkv(1, len_q=6), alone=True)
    worker.offer(2, "attention", qkv(1, len_q=3000))
    first, second, third = (worker.batch() for _ in range(3))
    assert [batch.packed for batch in (first, second, third)] == [True, True, False]
    assert [len(batch.tickets) for batch in (first, second, third)] == [1, 1, 1]
    again = list(worker.batching.answered(Batch([*first.tickets, *second.tickets], packed=True),
                                          _Failing(), lambda tickets: None))  # fmt: skip
    assert len(again) == 2


class _Failing:
    """Of jobs together, never of one."""

    def together(self, tickets: Sequence[Ticket]) -> list[Answer] | None:
        return None if len(tickets) > 1 else [Answer(Reply(id=tickets[0].job.id, size=0))]

    def run(self, ticket: Ticket) -> Answer:
        raise AssertionError("it would have other bits")

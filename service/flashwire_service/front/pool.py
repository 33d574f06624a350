"""The workers as one front end sees them: send a job, await its reply, give it up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashwire.wire import TensorRef
from flashwire_service.errors import EXHAUSTED, Refusal, is_exhaustion
from flashwire_service.front.evidence import Evidence
from flashwire_service.ipc.channel import AsyncChannel, Channel, ChannelClosed, PacketTooLarge
from flashwire_service.ipc.frames import (
    Acquit,
    Attach,
    Cancel,
    Drain,
    Failure,
    Frame,
    Hello,
    Job,
    Ready,
    Reload,
    Reply,
    State,
    Suspect,
    TensorSlot,
)
from flashwire_service.ipc.heartbeat import Heartbeat
from flashwire_service.ipc.memory import Memory
from flashwire_service.keys import Keyring
from flashwire_service.quarantine import Quarantine


@dataclass(slots=True, kw_only=True)
class Work:
    """What a worker is asked to do; the fields of frames.Job. `body` stays the caller's."""

    route: str
    options: Mapping[str, Any]
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)
    body: bytes | Memory = b""
    size: int = 0
    owner: str = ""
    max_queued: int | None = None
    max_residual_bytes: int | None = None
    device_bytes: int = 0
    accept: str = "msgpack"
    timeout_s: float


@dataclass(slots=True)
class Answer:
    """A good reply: its frame and, when the body did not fit in it, the memory that holds it."""

    reply: Reply
    memory: Memory | None
    worker: int


class Workers(Protocol):
    """What routes ask of a Pool; tests stand in for it."""

    async def run(self, work: Work, worker: int | None = None) -> Answer: ...
    @property
    def ready(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def facts(self) -> Mapping[int, Mapping[str, Any]]: ...
    @property
    def state(self) -> State: ...


@dataclass(slots=True, eq=False)
class _Worker:
    index: int
    channel: AsyncChannel
    hello: Hello | None = None
    heartbeat: Heartbeat | None = None  # None when there was no descriptor for it
    waiting: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    given_up: dict[int, Evidence] = field(default_factory=dict)  # jobs it computes for nobody

    @property
    def computing(self) -> tuple[int, ...]:
        """The ids of the jobs that it computes together, or computed when it ended; none where
        that is unknown.
        """
        return () if self.heartbeat is None else self.heartbeat.jobs


class _WorkerDied(Refusal):
    """Its worker has ended; `computing` when it was at this request, `alone` when at no other."""

    def __init__(self, *, computing: bool = False, alone: bool = True) -> None:
        super().__init__("worker_died", "the worker that computed this request has ended")
        self.computing = computing
        self.alone = alone


class Pool:
    """Attached workers. Use it from its event loop only.

    on_drain(grace) is called when the supervisor wants this process to finish and end, on_reload
    with the keys that hold from now on, on_orphaned() when the supervisor is gone, or a worker that
    it sent did not arrive: this process is then better replaced.
    """

    def __init__(
        self,
        on_drain: Callable[[float], None],
        on_orphaned: Callable[[], None],
        on_reload: Callable[[Keyring], None] = lambda _: None,
        quarantine_s: float = 3600.0,
    ) -> None:
        self._on_drain = on_drain
        self._on_reload = on_reload
        self._on_orphaned = on_orphaned
        self._control: AsyncChannel | None = None
        self._workers: dict[int, _Worker] = {}
        self._ids = itertools.count((os.getpid() << 32) + 1)  # no other front end's
        self._suspects = Quarantine(quarantine_s)
        self._blaming: set[asyncio.Task[None]] = set()
        self.draining = False
        self.state = State()  # as the supervisor last told it

    def listen(self, control: Channel) -> None:
        """Take workers from the supervisor, and tell it that this front end serves."""
        self._control = AsyncChannel(control, self._on_control, self._on_orphaned)
        self._control.send(Ready())

    def attach(self, index: int, sock: socket.socket) -> None:
        """A worker is at the other end of this socket. It replaces its predecessor."""
        if index in self._workers:
            self._lose(self._workers[index])
        worker: _Worker

        def on_frame(frame: Frame, fd: int | None) -> None:
            self._on_frame(worker, frame, fd)

        channel = AsyncChannel(Channel(sock), on_frame, lambda: self._lose(worker))
        self._workers[index] = worker = _Worker(index, channel)

    @property
    def ready(self) -> bool:
        """Whether a worker takes jobs, and this process is not ending."""
        return not self.draining and bool(self._ready())

    @property
    def facts(self) -> dict[int, Mapping[str, Any]]:
        """What each ready worker said of itself, with its pid."""
        return {
            w.index: {**w.hello.facts, "pid": w.hello.pid}
            for w in self._workers.values()
            if w.hello
        }

    def drain(self) -> None:
        """Be ready no more. Requests in flight go on."""
        self.draining = True

    def sweep(self) -> None:
        """Let go of what was given up and is no more computed. To be called now and then."""
        for worker in self._workers.values():
            if worker.given_up:
                computing = worker.computing
                worker.given_up = {n: e for n, e in worker.given_up.items() if n in computing}

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        """The answer of the least busy worker, or of the named one. The caller closes its memory.

        Work is pure: where its worker dies, another one that is ready gets it, once; unless its
        computing has ended two.

        Raises Refusal: what the worker refused; no_worker; worker_died; quarantined;
        deadline_exceeded; gone when the named worker is not there; queue_full when there is no
        descriptor left. When cancelled, it tells the worker that nobody waits.
        """
        deadline = time.monotonic() + work.timeout_s
        suspect = await self._known_suspect(work)
        try:
            answer = await self._run_on(
                self._choose(worker), work, deadline, alone=suspect is not None
            )
        except _WorkerDied as died:
            if died.computing:
                suspect = await self._blame(Evidence.of(work), alone=died.alone)
            if worker is not None or not self._ready():
                raise
            answer = await self._run_again(work, deadline, alone=suspect is not None)
        if suspect is not None and self._suspects.survived(suspect):
            self._report(Acquit(digest=suspect))
        return answer

    async def _run_again(self, work: Work, deadline: float, *, alone: bool) -> Answer:
        try:
            return await self._run_on(self._choose(None), work, deadline, alone=alone)
        except _WorkerDied as died:
            if died.computing:
                await self._blame(Evidence.of(work), alone=died.alone)
            raise

    async def _run_on(self, chosen: _Worker, work: Work, deadline: float, *, alone: bool) -> Answer:
        job = self._job(work, deadline, alone=alone)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        chosen.waiting[job.id] = future
        try:
            fd = work.body.fd if isinstance(work.body, Memory) else None
            chosen.channel.send(job, fd)
            async with asyncio.timeout(deadline - time.monotonic()):
                return await future
        except ChannelClosed:
            raise _WorkerDied from None
        except PacketTooLarge:
            raise Refusal("malformed", "the options and headers are too large") from None
        except TimeoutError:
            _give_up(chosen, job, work, future)
            limit = round(work.timeout_s * 1000)
            raise Refusal("deadline_exceeded", f"there was no answer within {limit} ms") from None
        except asyncio.CancelledError:
            _give_up(chosen, job, work, future)
            raise
        finally:
            del chosen.waiting[job.id]

    async def _known_suspect(self, work: Work) -> bytes | None:
        """The digest of work that may be in the book of suspects. Raises Refusal (quarantined)."""
        if self._suspects.empty:
            return None
        evidence = Evidence.of(work)
        if not self._suspects.knows(evidence.head):
            return None
        digest = await evidence.digest()
        self._refuse(digest)
        return digest

    async def _blame(self, evidence: Evidence, *, alone: bool) -> bytes:
        """A worker ended of it, or of one of those computed with it. Returns its digest, or raises
        Refusal (quarantined).
        """
        digest = await evidence.digest()
        if not self.draining:
            self._suspects.died(evidence.head, digest, alone=alone)
            self._report(Suspect(head=evidence.head, digest=digest, alone=alone))
            self._refuse(digest)
        return digest

    async def _blame_unheard(self, evidence: Evidence, *, alone: bool) -> None:
        with contextlib.suppress(Refusal):  # its caller has left
            await self._blame(evidence, alone=alone)

    def _refuse(self, digest: bytes) -> None:
        if self._suspects.refuses(digest):
            raise Refusal(
                "quarantined",
                "two workers ended while they computed this very request, so it is refused for now",
            )

    def _report(self, frame: Suspect | Acquit) -> None:
        if self._control is not None:
            with contextlib.suppress(ChannelClosed):  # the supervisor is gone, and soon this is
                self._control.send(frame)

    def _ready(self) -> list[_Worker]:
        return [w for w in self._workers.values() if w.hello]

    def _choose(self, index: int | None) -> _Worker:
        ready = self._ready()
        if index is not None:
            ready = [w for w in ready if w.index == index]
            if not ready:  # what it held went with it
                raise Refusal("gone", "the worker that held this residual has ended")
        if not ready:
            raise Refusal("no_worker", "no worker is ready")
        return min(ready, key=lambda w: len(w.waiting))

    def _job(self, work: Work, deadline: float, *, alone: bool) -> Job:
        return Job(
            id=next(self._ids),
            route=work.route,
            options=dict(work.options),
            tensors={
                name: TensorSlot(ref.dtype, ref.shape, ref.segments)
                for name, ref in work.tensors.items()
            },
            size=work.size,
            body=work.body if isinstance(work.body, bytes) else None,
            owner=work.owner,
            max_queued=work.max_queued,
            max_residual_bytes=work.max_residual_bytes,
            device_bytes=work.device_bytes,
            accept=work.accept,
            alone=alone,
            received=time.monotonic(),
            deadline=deadline,
        )

    def _on_control(self, frame: Frame, fd: int | None) -> None:
        match frame:
            case Attach() if fd is not None:
                self.attach(frame.peer, socket.socket(fileno=fd))
            case Attach():  # there was no descriptor for it, and nobody will send it again
                self._on_orphaned()
            case State():
                self.state = frame
                self._suspects.install(frame.suspects)
            case Reload():
                self._on_reload(Keyring.unpacked(frame.keys))
            case Drain():
                self._on_drain(frame.grace)

    def _on_frame(self, worker: _Worker, frame: Frame, fd: int | None) -> None:
        match frame:
            case Hello():
                worker.hello, worker.heartbeat = frame, _heartbeat(fd)
            case Reply():
                self._on_reply(worker, frame, fd)
            case Failure():
                if future := _unanswered(worker, frame.id):
                    future.set_exception(
                        Refusal(
                            frame.code,
                            frame.detail,
                            field=frame.field,
                            reasons=frame.reasons,
                            retry_after=frame.retry_after,
                        )
                    )

    def _on_reply(self, worker: _Worker, reply: Reply, fd: int | None) -> None:
        future = _unanswered(worker, reply.id)
        try:
            memory = None if fd is None else Memory.adopt(fd, reply.size)
        except OSError as exc:
            if not is_exhaustion(exc):
                raise
            memory = None
        if future is None:
            if memory is not None:
                memory.close()
        elif memory is None and reply.body is None and reply.size:
            future.set_exception(Refusal("queue_full", EXHAUSTED))
        else:
            future.set_result(Answer(reply, memory, worker.index))

    def _lose(self, worker: _Worker) -> None:
        """A worker has ended: whoever waits for it is told so."""
        worker.channel.close()
        if self._workers.get(worker.index) is worker:
            del self._workers[worker.index]
        computing = worker.computing
        alone = len(computing) == 1
        for number, future in worker.waiting.items():
            if not future.done():
                future.set_exception(_WorkerDied(computing=number in computing, alone=alone))
        for number, evidence in worker.given_up.items():
            if number in computing:
                task = asyncio.ensure_future(self._blame_unheard(evidence, alone=alone))
                self._blaming.add(task)
                task.add_done_callback(self._blaming.discard)
        worker.given_up = {}
        if worker.heartbeat is not None:
            worker.heartbeat.close()
            worker.heartbeat = None


def _unanswered(worker: _Worker, job_id: int) -> asyncio.Future[Answer] | None:
    """Who waits for this job; nobody when it was given up in the meantime."""
    future = worker.waiting.get(job_id)
    return None if future is None or future.done() else future


def _tell(worker: _Worker, frame: Frame) -> None:
    """To a worker that may have ended: then there is nothing left to tell it."""
    with contextlib.suppress(ChannelClosed):
        worker.channel.send(frame)


def _give_up(worker: _Worker, job: Job, work: Work, future: asyncio.Future[Answer]) -> None:
    """Nobody waits for this job any more. If it is being computed, it may yet end its worker; if it
    was answered in this very moment, the memory of its reply is let go.
    """
    if future.done() and not future.cancelled() and future.exception() is None:
        memory = future.result().memory
        if memory is not None:
            memory.close()
    _tell(worker, Cancel(id=job.id))
    if job.id in worker.computing:
        with contextlib.suppress(OSError):  # no mapping to be had: its death would go unexplained
            worker.given_up[job.id] = Evidence.of(work)


def _heartbeat(fd: int | None) -> Heartbeat | None:
    """A worker's page, where there was a descriptor and a mapping to be had for it."""
    try:
        return None if fd is None else Heartbeat.receive(fd)
    except OSError as exc:
        if not is_exhaustion(exc):
            raise
        return None

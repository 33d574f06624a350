"""The frames between processes, typed. One packet is one frame; a descriptor may ride along.

Times are CLOCK_MONOTONIC seconds: one clock for every process of the machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import msgpack

from flashwire_service.quarantine import Entry


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor in a job's body: its header, and (offset, length) of each piece of its data."""

    dtype: str
    shape: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work for a worker. The body is `body` when small, else the memfd that rides along.

    tensors   by the name of their place in the message: "q", "request.q", "mine.dq"
    options   validated by the front end, defaults omitted
    accept    "msgpack" or "json": the form of the reply's body
    owner     digest of the caller's key, "" without keys
    max_queued, max_residual_bytes
              what this owner may have of the worker's queue and saved forwards; None: all of it
    device_bytes
              memory that computing it is estimated to need: inputs, results and what lies between
    alone     to be computed with no other: one of those whose computing ended a worker
    """

    kind: ClassVar[str] = "job"
    id: int  # unique among all front ends
    route: str  # "attention", "backward", "check", "release"
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorSlot] = field(default_factory=dict)
    size: int = 0
    body: bytes | None = None
    owner: str = ""
    max_queued: int | None = None
    max_residual_bytes: int | None = None
    device_bytes: int = 0
    accept: str = "msgpack"
    alone: bool = False
    received: float = 0.0
    deadline: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The caller of this job has left, or its deadline has passed: drop it, or drop its reply."""

    kind: ClassVar[str] = "cancel"
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker has computed a real answer on its device and takes jobs. `facts` feed /info. The
    page of its heartbeat rides along: it tells what was being computed when the worker ended.
    """

    kind: ClassVar[str] = "hello"
    worker: int
    pid: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The HTTP body of a good reply: `body` when small, else `size` bytes of the memfd."""

    kind: ClassVar[str] = "reply"
    id: int
    size: int
    body: bytes | None = None
    backend: str = ""
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    started: float = 0.0  # when its computing began


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A job that ends in an error of the service's table (errors.py)."""

    kind: ClassVar[str] = "failure"
    id: int
    code: str
    detail: str
    field: str | None = None
    reasons: tuple[str, ...] = ()
    retry_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """From the supervisor, a child's first frame: who it is. The page of its heartbeat rides
    along.
    """

    kind: ClassVar[str] = "start"
    index: int
    parent: int
    settings: bytes  # Settings.to_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """From the supervisor, a child's second frame: the board (ipc/board.py) rides along."""

    kind: ClassVar[str] = "share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """From the supervisor, a front's third frame: a listening socket rides along. Another follows
    where there is a unix socket, too.
    """

    kind: ClassVar[str] = "listen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """To the supervisor, once: this child now serves. `facts` are for the log."""

    kind: ClassVar[str] = "ready"
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """From the supervisor: the socket that rides along leads to `peer`, a worker or a front.

    It replaces the one to the same peer that came before: that process is gone.
    """

    kind: ClassVar[str] = "attach"
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """From the supervisor to a front: only these keys hold from now on (Keyring.packed()), and the
    files of the TLS certificate are to be read again.
    """

    kind: ClassVar[str] = "reload"
    keys: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """From the supervisor: take no new work, finish what is there, end."""

    kind: ClassVar[str] = "drain"
    grace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """To the supervisor: a worker has ended while it computed this request, alone or with others
    (quarantine.py).
    """

    kind: ClassVar[str] = "suspect"
    head: bytes
    digest: bytes
    alone: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquit:
    """To the supervisor: a worker has answered this suspect, and lives."""

    kind: ClassVar[str] = "acquit"
    digest: bytes


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's place, as the supervisor sees it. Times are CLOCK_MONOTONIC seconds."""

    ready: bool
    since: float  # when it became so
    cause: str  # how the last process there ended; "" when none has
    restarts: int
    next_try: float  # when a process will be started; 0.0 when there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """From the supervisor to a front, at its start and on every change: what all should know.

    suspects  the book of requests that ended workers
    """

    kind: ClassVar[str] = "state"
    workers: tuple[WorkerState, ...] = ()
    suspects: tuple[Entry, ...] = ()


Frame = (
    Job | Cancel | Hello | Reply | Failure
    | Start | Share | Listen | Ready | Attach | Reload | Drain | Suspect | Acquit | State
)  # fmt: skip
_KINDS: dict[str, type[Any]] = {t.kind: t for t in get_args(Frame)}


def encode(frame: Frame) -> bytes:
    """A frame as one packet."""
    values = {f.name: getattr(frame, f.name) for f in dataclasses.fields(frame)}
    if isinstance(frame, Job):
        values["tensors"] = {
            name: (t.dtype, t.shape, t.segments) for name, t in frame.tensors.items()
        }
    elif isinstance(frame, State):
        values["workers"] = [dataclasses.astuple(worker) for worker in frame.workers]
        values["suspects"] = [dataclasses.astuple(entry) for entry in frame.suspects]
    packed: bytes = msgpack.packb({"kind": frame.kind, **values})
    return packed


def decode(packet: bytes | memoryview) -> Frame:
    """The frame of a packet. Packets come from our own processes: a bad one is a bug: it raises."""
    values = msgpack.unpackb(packet, use_list=False, strict_map_key=False)
    frame_type = _KINDS[values.pop("kind")]
    if frame_type is Job:
        values["tensors"] = {name: TensorSlot(*slot) for name, slot in values["tensors"].items()}
    elif frame_type is State:
        values["workers"] = tuple(WorkerState(*row) for row in values["workers"])
        values["suspects"] = tuple(Entry(*row) for row in values["suspects"])
    frame: Frame = frame_type(**values)
    return frame

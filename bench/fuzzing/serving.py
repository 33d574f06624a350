"""The front end's application, from a request's bytes to the job that a worker would get."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

from flashwire_service.front.app import create_app
from flashwire_service.front.pool import Answer, Pool, Work
from flashwire_service.ipc import frames
from flashwire_service.ipc.memory import Memory
from flashwire_service.logs import Log
from flashwire_service.settings import Settings
from fuzzing.targets import MAX_BODY, Cuts, check_places, require

SETTINGS = Settings(max_body_bytes=MAX_BODY, residual_bytes=2**20)
PATHS = {
    "attention": "/attention",
    "backward": "/attention/backward",
    "check": "/attention/check",
    "plan": "/attention/plan",
}
_REFUSALS = (400, 404, 413, 422)
_LONGEST_REPLY = 100_000


class _Worker(Pool):
    """Takes every job and says nothing of it."""

    def __init__(self) -> None:
        super().__init__(on_drain=lambda _: None, on_orphaned=lambda: None)
        self.job: frames.Job | None = None

    async def run(self, work: Work, worker: int | None = None) -> Answer:
        check_places(work.tensors, work.size)
        require(not isinstance(work.body, Memory) or work.size > 0, "empty memory")
        self.job = _as_seen(work)
        return Answer(frames.Reply(id=1, size=2, body=b"{}"), None, 0)


class Front:
    """The application, asked without a network."""

    def __init__(self) -> None:
        self._worker = _Worker()
        self._app = create_app(SETTINGS, self._worker, Log("fuzz", "error"))

    async def ask(
        self, schema: str, data: bytes, cuts: Cuts, media_type: str
    ) -> tuple[str, frames.Job | None]:
        """("accepted", the job), ("answered", None) or the code of the refusal. Raises Broken."""
        self._worker.job = None
        sent: list[dict[str, Any]] = []
        events = _events(data, cuts)

        async def receive() -> dict[str, Any]:
            for event in events:
                return event
            return await asyncio.Future()  # the caller stays

        async def send(event: Any) -> None:
            sent.append(event)

        headers = [(b"host", b"fuzz"), (b"content-type", media_type.encode())]
        if len(cuts) % 2:  # the others come in chunks, and do not say how much there is
            headers.append((b"content-length", str(len(data)).encode()))
        path = PATHS[schema]
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http",
            "server": ("fuzz", 80), "client": ("fuzz", 1), "root_path": "",
        }  # fmt: skip
        await self._app(scope, receive, send)
        return _outcome(sent, self._worker.job)


def _events(data: bytes, cuts: Cuts) -> Iterator[dict[str, Any]]:
    """The body in pieces."""
    ends = [*(cut for cut in cuts if cut < len(data)), len(data)]
    for a, b in itertools.pairwise([0, *ends]):
        yield {"type": "http.request", "body": data[a:b], "more_body": b < len(data)}


def _outcome(sent: list[dict[str, Any]], job: frames.Job | None) -> tuple[str, frames.Job | None]:
    status, body = sent[0]["status"], b"".join(event.get("body", b"") for event in sent[1:])
    if status == 200:
        return ("answered", None) if job is None else ("accepted", job)
    require(status in _REFUSALS, f"status {status}: {body[:500]!r}")
    require(job is None, "a job was made of a refused request")
    require(len(body) < _LONGEST_REPLY, f"a refusal of {len(body)} bytes")
    return str(json.loads(body)["code"]), None


def _as_seen(work: Work) -> frames.Job:
    """The job of this work, packed and unpacked."""
    fields = {f.name for f in dataclasses.fields(frames.Job)}
    shared = {f.name for f in dataclasses.fields(work)} & fields - {"body", "tensors"}
    slots = {
        name: frames.TensorSlot(ref.dtype, ref.shape, ref.segments)
        for name, ref in work.tensors.items()
    }
    inline = work.body if isinstance(work.body, bytes) else bytes(work.body.view)
    values = {name: getattr(work, name) for name in shared}
    made = frames.Job(id=1, tensors=slots, body=inline, **values)
    seen = frames.decode(frames.encode(made))
    if not isinstance(seen, frames.Job):
        raise TypeError("a job became another frame")
    return seen

"""Users of a service: who asks what, in which manner, and what counts as a violation.

Every reply of status 200 is judged against the reference. A refusal must be the one that the
request deserves, or one that `History` excuses. Nothing may stay unanswered for longer than its
deadline and HUNG_S.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from flashwire import wire
from load import checking, invalid, tiny
from load.connection import Connection, Lost, Reply, Request
from load.history import History
from load.judge import Judge
from load.tally import Tally

HUNG_S = 5.0  # beyond a deadline
STOPPED_S = 12.0  # until a stopped front end counts as hung and is killed
_ID = "x-request-id"
_CHUNK, _MOST_CHUNKS = 4096, 4000
_SENDING_S = 60.0  # for a request to be sent, however slowly it is taken

MIX: Mapping[str, float] = {
    "forward": 6, "json forward": 2, "backward": 4, "json backward": 1, "residual": 4, "check": 2,
    "plan": 2, "large": 3, "tiny": 12, "invalid": 14, "short deadline": 3, "slow": 2, "chunked": 2,
    "left": 5,
}  # fmt: skip
"""How often each is asked, relative to the others."""


@dataclass(kw_only=True)
class Target:
    """Where to, within which limits, and where to note what came of it.

    gate   users wait here between two requests, so that all can be made to pause
    """

    host: str
    port: int
    max_body: int
    deadline_s: float
    residual_ttl_s: float
    judge: Judge
    tally: Tally
    history: History
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    gate: asyncio.Event = field(default_factory=asyncio.Event)


class User:
    """One of many, on a connection of its own, which it keeps while it can."""

    def __init__(self, target: Target, number: int, pause_s: float) -> None:
        self._target = target
        self._random = random.Random(number)
        self._pause_s = pause_s
        self._connection: Connection | None = None
        self.idle = True

    async def run(self, mix: Mapping[str, float] = MIX) -> None:
        """Ask until cancelled."""
        try:
            while True:
                self.idle = True
                await self._target.gate.wait()
                self.idle = False
                (what,) = self._random.choices(list(mix), list(mix.values()))
                await self.ask(what)
                await asyncio.sleep(self._random.uniform(0, 2 * self._pause_s))
        finally:
            self.leave()

    async def cover(self, times: int) -> None:
        """Everything of MIX so often, whatever the gate says."""
        for _ in range(times):
            for what in self._random.sample(list(MIX), len(MIX)):
                await self.ask(what)

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def ask(self, what: str) -> None:
        """One thing of MIX."""
        special: Mapping[str, Callable[[], Awaitable[None]]] = {
            "tiny": self._tiny, "invalid": self._invalid, "residual": self._residual,
            "short deadline": self._short_deadline, "left": self._left,
        }  # fmt: skip
        if what in special:
            await special[what]()
            return
        kind = "forward" if what in ("slow", "chunked") else what
        seed = next(self._target.seeds)
        request = self._named(await self._target.judge.build(kind, seed), seed)
        pieces = {"slow": self._in_pieces, "chunked": self._in_chunks}.get(what, _whole)(request)
        wait = 0.3 if what == "slow" else 0.0
        reply = await self._exchange(what, pieces, request.headers[_ID], wait=wait)
        await self._judged(what, kind, seed, reply)

    async def _judged(self, what: str, kind: str, seed: int, reply: Reply | None) -> None:
        if reply is None or reply.status != 200:
            return
        wrong = await self._target.judge.judge(kind, seed, reply)
        self._target.tally.count(what, "200 wrong" if wrong else "200 right")
        if wrong:
            self._target.tally.violation(f"{what}, seed {seed}: {wrong}")

    # Special requests

    async def _tiny(self) -> None:
        seed = next(self._target.seeds)
        request, out = tiny.build(seed)
        request = self._named(request, seed)
        reply = await self._exchange("tiny", _whole(request), request.headers[_ID])
        if reply is None or reply.status != 200:
            return
        right = tiny.out_of(reply) == out
        self._target.tally.count("tiny", "200 right" if right else "200 wrong")
        if not right:
            self._target.tally.violation(f"tiny, seed {seed}: {tiny.out_of(reply)}, not {out}")

    async def _invalid(self) -> None:
        bad = invalid.draw(self._random, self._target.max_body)
        await self._exchange("invalid", bad.pieces, None, expected=bad.expected)

    async def _residual(self) -> None:
        """A saved forward, its backward by the residual, perhaps twice, and perhaps its release."""
        seed, ask = next(self._target.seeds), self._exchange
        until = time.monotonic() + self._target.residual_ttl_s / 2
        request = self._named(await self._target.judge.build("saved", seed), seed)
        saved = await ask("saved", _whole(request), request.headers[_ID])
        await self._judged("saved", "saved", seed, saved)
        if saved is None or saved.status != 200:
            return
        residual = str(wire.decode(saved.body, wire.REPLY).options["residual"])
        for _ in range(self._random.randint(1, 2)):
            made = await self._target.judge.build("by residual", seed, residual)
            if time.monotonic() > until:  # it may have expired before this is computed
                return
            request = self._named(made, seed)
            reply = await ask("by residual", _whole(request), request.headers[_ID])
            await self._judged("by residual", "by residual", seed, reply)
        if self._random.random() < 0.8 and time.monotonic() < until:
            path = f"/attention/residual/{residual}"
            release = self._named(Request(method="DELETE", path=path), seed)
            await ask("release", _whole(release), release.headers[_ID])

    async def _short_deadline(self) -> None:
        """It may well be too short."""
        seed = next(self._target.seeds)
        request = await self._target.judge.build("forward", seed)
        within = self._random.choice((1, 2, 5, 10, 30))
        request = self._named(request, seed, within / 1000)
        reply = await self._exchange(
            "short deadline", _whole(request), request.headers[_ID],
            expected=(504, "deadline_exceeded"), deadline_s=within / 1000,
        )  # fmt: skip
        await self._judged("short deadline", "forward", seed, reply)

    async def _left(self) -> None:
        """Gone while its head, its body or its reply is on the way."""
        seed = next(self._target.seeds)
        kind = self._random.choice(("forward", "backward", "large", "check"))
        request = self._named(await self._target.judge.build(kind, seed), seed)
        whole = request.whole()
        cut = self._random.choice((10, len(whole) // 2, len(whole) - 1, len(whole)))
        self._target.tally.count("left", "gone")
        try:
            connection = await Connection.open(self._target.host, self._target.port)
            await connection.send(whole[:cut])
        except Lost as e:
            self._lost("left", e, time.monotonic())
            return
        await asyncio.sleep(self._random.choice((0, 0.005, 0.05, 0.5)))
        connection.abort()

    # How it is sent, and what comes back

    def _named(self, request: Request, seed: int, deadline_s: float | None = None) -> Request:
        within = self._target.deadline_s if deadline_s is None else deadline_s
        headers = {_ID: f"load-{seed}", "flashwire-timeout-ms": str(round(1000 * within))}
        return replace(request, headers={**request.headers, **headers})

    def _in_pieces(self, request: Request) -> tuple[bytes, ...]:
        """At most six pieces, and as many pauses."""
        whole = request.whole()
        size = max(1, -(-len(whole) // self._random.randint(2, 6)))
        return tuple(whole[at : at + size] for at in range(0, len(whole), size))

    def _in_chunks(self, request: Request) -> tuple[bytes, ...]:
        least = -(-len(request.body) // _MOST_CHUNKS)
        return tuple(request.chunked(self._random.choice((least, least + 100, _CHUNK))))

    async def _exchange(
        self,
        what: str,
        pieces: tuple[bytes, ...],
        request_id: str | None,
        *,
        expected: invalid.Refused | None = None,
        deadline_s: float | None = None,
        wait: float = 0.0,
    ) -> Reply | None:
        """Send, with `wait` s before each further piece, and take the reply. Notes whatever is no
        reply of status 200. None when there is none.
        """
        target = self._target
        within = target.deadline_s if deadline_s is None else deadline_s
        began = time.monotonic()
        connection = None
        try:
            async with asyncio.timeout(_SENDING_S):
                connection = await self._connected()
                for number, piece in enumerate(pieces):
                    await asyncio.sleep(wait if number else 0)
                    await connection.send(piece)
            reply = await self._reply(connection, within + HUNG_S)
        except TimeoutError:
            self.leave()
            target.tally.count(what, "hung")
            waited = time.monotonic() - began
            at = time.strftime("%H:%M:%S", time.gmtime())
            told = f"{what} {request_id}: no reply after {waited:.1f} s, at {at}"
            target.tally.violation(told)
            return None
        except Lost as e:
            self._lost(what, e, began if connection is None else connection.opened)
            return None
        self._note(what, reply, request_id, expected, began, within)
        return reply

    async def _reply(self, connection: Connection, limit: float) -> Reply:
        """Raises Lost, and TimeoutError after `limit` s; later for one that a stopped front end
        holds, of which nobody can tell its callers before it is replaced.
        """
        try:
            async with asyncio.timeout(limit):
                return await connection.reply()
        except TimeoutError:
            if not self._target.history.excuses_silence(connection.opened):
                raise
        async with asyncio.timeout(STOPPED_S):
            return await connection.reply()

    def _note(
        self,
        what: str,
        reply: Reply,
        request_id: str | None,
        expected: invalid.Refused | None,
        began: float,
        within: float,
    ) -> None:
        """Count a reply, but for a good one, which is yet to be judged."""
        tally, took = self._target.tally, time.monotonic() - began
        if deformed := checking.deformity(reply, request_id):
            tally.violation(f"{what}: {deformed}")
        if reply.status < 300 and (expected is None or expected[0] == 504):
            tally.took(what, took)
            if reply.status != 200:
                tally.count(what, str(reply.status))
            return
        code = checking.code_of(reply)
        tally.count(what, f"{reply.status} {code}")
        if code == "deadline_exceeded" and took < within:
            tally.violation(f"{what}: 504 after {took:.3f} s, before its deadline of {within:g} s")
        if (reply.status, code) != expected and not self._target.history.excuses(code, began):
            said = reply.body[:300].decode(errors="replace")
            tally.violation(f"{what}: {reply.status} {said}, expected {expected or 200}")

    def _lost(self, what: str, why: Lost, opened: float) -> None:
        self._target.tally.count(what, "connection lost")
        if not self._target.history.excuses_loss(opened):
            self._target.tally.violation(f"{what}: the connection was lost: {why}")

    async def _connected(self) -> Connection:
        if self._connection is None or not self._connection.usable:
            self._connection = await Connection.open(self._target.host, self._target.port)
        return self._connection


def _whole(request: Request) -> tuple[bytes, ...]:
    return (request.whole(),)

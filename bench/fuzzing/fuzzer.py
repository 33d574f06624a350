"""Every target, fed from numbers."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from flashwire import wire
from fuzzing.computing import Worker
from fuzzing.mutating import Example, Mutator
from fuzzing.serving import Front
from fuzzing.targets import Broken, decoded

MOST_CPU_S = 1.0  # for one body
_JSON = "application/json"


class Fuzzer:
    """`every`: one body in so many goes past the decoder, with one in JSON beside it.

    outcomes   how often each came, by what was asked
    slowest    (CPU seconds, what) of one body
    """

    def __init__(self, examples: list[Example], every: int) -> None:
        self._mutator = Mutator(examples)
        self._every = every
        self._front, self._worker = Front(), Worker()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.slowest = (0.0, "")

    async def one(self, number: int) -> None:
        """The body of a number, and those that go with it. Whatever it raises is a fault."""
        schema, data = self._mutator.message(number)
        cuts = _cuts(number, len(data))
        with self._timed(f"body {number} in the decoder"):
            self.outcomes["decoder"][decoded(schema, data, cuts)] += 1
        if number % self._every or schema == "reply":
            return
        await self._serve(schema, data, cuts, wire.MEDIA_TYPE, number)
        schema, data = self._mutator.json(number)
        await self._serve(schema, data, _cuts(number, len(data)), _JSON, number)

    async def _serve(
        self, schema: str, data: bytes, cuts: list[int], media_type: str, number: int
    ) -> None:
        name = "JSON" if media_type == _JSON else "msgpack"
        with self._timed(f"body {number} as {name}"):
            outcome, made = await self._front.ask(schema, data, cuts, media_type)
        self.outcomes[f"{name} to job"][outcome] += 1
        if made is not None:
            with self._timed(f"body {number} as {name}, computed"):
                self.outcomes[f"{name} computed"][self._worker.answered(made)] += 1

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.process_time()
        yield
        took = time.process_time() - began
        self.slowest = max(self.slowest, (took, what))
        if took > MOST_CPU_S:
            raise Broken(f"{what} took {took:.1f} s")


def _cuts(number: int, size: int) -> list[int]:
    """Where the pieces end in which a body arrives."""
    r = random.Random(-1 - number)
    return sorted(r.randint(0, size) for _ in range(r.randint(0, 6)))

"""The table of a run, and its ratios with their bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from wiring.cases import BATCH, CASES, DECODE, TINY, Case
from wiring.wires import (
    BARE,
    MEMCPY,
    PLAIN,
    PLAIN_HTTPX,
    RAW_TCP,
    SERVICES,
    SHARED,
    TCP,
    UNIX,
)

_MISSING = "not there"


@dataclass
class Found:
    """What a run has measured. Seconds and bytes.

    rounds     by case and wire, for each round its exchanges: (seconds, those of computing in it)
    alone      by case, computing without a wire: flashwire_kernels, SDPA
    company    by wire, for each round the tiny requests answered a second
    held       bytes that front end and worker hold, idle and at most
    """

    rounds: dict[tuple[str, str], list[list[tuple[float, float]]]] = field(default_factory=dict)
    alone: dict[str, tuple[float, float]] = field(default_factory=dict)
    company: dict[str, list[float]] = field(default_factory=dict)
    held: tuple[int, int] | None = None

    def latencies(self, case: Case, wire: str) -> list[float]:
        """Of each exchange."""
        return [took for one in self.rounds.get((case.name, wire), ()) for took, _ in one]

    def moving(self, case: Case, wire: str) -> list[float]:
        """What is not computing: for each round, the median of its exchanges."""
        found = self.rounds.get((case.name, wire), ())
        return [statistics.median(took - computing for took, computing in one) for one in found]

    def computing(self, case: Case, wire: str) -> float:
        found = self.rounds.get((case.name, wire), ())
        return statistics.median(computing for one in found for _, computing in one)

    def p50s(self, case: Case, wire: str) -> list[float]:
        """For each round, the median of its exchanges."""
        found = self.rounds.get((case.name, wire), ())
        return [statistics.median(took for took, _ in one) for one in found]


@dataclass(frozen=True)
class Bar:
    """A ratio that is to be at least, or at most, so much. None where it was not measured."""

    name: str
    ratio: float | None
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.ratio is None:
            return None
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    def __str__(self) -> str:
        verdict = {None: "not measured", True: "pass", False: "FAIL"}[self.met]
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        sense = "at least" if self.at_least else "at most"
        return f"{self.name:74} {ratio:>7}  {sense} {self.limit:g}: {verdict}"


def table(found: Found) -> Iterator[str]:
    """Lines for people: each case, then callers at once, then memory."""
    for case in CASES:
        if any(name == case.name for name, _ in found.rounds):
            yield from _of_case(found, case)
    if found.company:
        yield "\ntiny requests a second, of all callers at once"
        for wire, rates in found.company.items():
            yield f"  {wire:26} {statistics.median(rates):9.0f}"
    if found.held:
        idle, most = (held / 1e6 for held in found.held)
        yield f"\nmemory of front end and worker (PSS): {idle:.0f} MB idle, {most:.0f} MB at most"


def bars(found: Found) -> list[Bar]:
    """The ratios that the project promises. `moving` is a request without its computing."""
    moving, p50s = found.moving, found.p50s
    grown = None
    if found.held:
        grown = (found.held[1] - found.held[0]) / DECODE.up
    return [
        Bar("67 MB up, moving: raw TCP / flashwire",
            _ratio(moving(DECODE, RAW_TCP), moving(DECODE, TCP)), 0.7),
        Bar("67 MB up, moving: plain / flashwire",
            _ratio(moving(DECODE, PLAIN), moving(DECODE, TCP)), 6),
        Bar("50 MB up, 17 MB down, moving: plain / flashwire",
            _ratio(moving(BATCH, PLAIN), moving(BATCH, TCP)), 5),
        Bar("67 MB up, moving: flashwire TCP / unix socket",
            _ratio(moving(DECODE, TCP), moving(DECODE, UNIX)), 1),
        Bar("50 MB up, 17 MB down, moving: flashwire TCP / unix socket",
            _ratio(moving(BATCH, TCP), moving(BATCH, UNIX)), 1),
        Bar("67 MB, shared memory: moving / memcpy of the payload",
            _ratio(moving(DECODE, SHARED), p50s(DECODE, MEMCPY)), 3, at_least=False),
        Bar("tiny: p50 of flashwire / plain",
            _ratio(p50s(TINY, TCP), p50s(TINY, PLAIN)), 1, at_least=False),
        Bar("tiny: p50 of flashwire / plain by httpx",
            _ratio(p50s(TINY, TCP), p50s(TINY, PLAIN_HTTPX)), 1, at_least=False),
        Bar("tiny, callers at once: requests a second, flashwire / plain",
            _ratio(found.company.get(TCP, ()), found.company.get(PLAIN, ())), 2),
        Bar("tiny, callers at once: requests a second, flashwire / plain by httpx",
            _ratio(found.company.get(TCP, ()), found.company.get(PLAIN_HTTPX, ())), 2),
        Bar("67 MB: (memory at most - idle) / payload", grown, 2, at_least=False),
    ]  # fmt: skip


def _ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    """The median of pairs, one of each round."""
    pairs = list(zip(above, below, strict=False))
    return statistics.median(a / b for a, b in pairs) if pairs else None


def _of_case(found: Found, case: Case) -> Iterator[str]:
    alone = ""
    if case.name in found.alone:
        mine, sdpa = (1e3 * seconds for seconds in found.alone[case.name])
        alone = f"; computing alone {mine:.2f} ms, by SDPA {sdpa:.2f} ms"
    yield f"\n{case.name}: {case.up:,} bytes up, {case.down:,} down{alone}"
    yield f"  {'':26} {'p50 ms':>9} {'p95 ms':>9} {'computing':>9} {'moving':>9} {'GB/s':>6}"
    for wire in (*BARE, *SERVICES):
        latencies = found.latencies(case, wire)
        if not latencies:
            yield f"  {wire:26} {_MISSING:>9}"
            continue
        p50, p95 = statistics.median(latencies), _p95(latencies)
        moving = statistics.median(found.moving(case, wire))
        speed = (case.up + case.down) / moving / 1e9
        times = (p50, p95, found.computing(case, wire), moving)
        yield f"  {wire:26} {' '.join(f'{1e3 * s:9.2f}' for s in times)} {speed:6.2f}"


def _p95(latencies: Sequence[float]) -> float:
    return sorted(latencies)[min(len(latencies) - 1, int(0.95 * len(latencies)))]

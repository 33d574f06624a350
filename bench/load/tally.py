"""Outcomes, latencies and violations: counted, and printed as tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

MAX_SHOWN = 20


class Tally:
    """`violations` are what must not happen; a run with none has passed."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._latencies: dict[str, list[float]] = defaultdict(list)

    def count(self, kind: str, outcome: str) -> None:
        self._outcomes[kind][outcome] += 1

    def took(self, kind: str, seconds: float) -> None:
        """From the first byte of a good request to the last of its reply."""
        self._latencies[kind].append(seconds)

    def violation(self, text: str) -> None:
        self.violations.append(text)

    @property
    def requests(self) -> int:
        return sum(sum(counter.values()) for counter in self._outcomes.values())

    def of(self, outcome: str) -> int:
        """How often it came, over all kinds."""
        return sum(counter[outcome] for counter in self._outcomes.values())

    def print_outcomes(self) -> None:
        """One line for each kind: its outcomes, most frequent first."""
        print(f"\n{'asked':16} {'times':>6}  outcomes")
        for kind, counter in sorted(self._outcomes.items()):
            told = ", ".join(f"{outcome}: {n}" for outcome, n in counter.most_common())
            print(f"{kind:16} {sum(counter.values()):6}  {told}")
        print(f"{'in all':16} {self.requests:6}")

    def print_latencies(self) -> None:
        """Median, 95th and 99th percentile of each kind, in milliseconds."""
        print(f"\n{'good reply to':16} {'times':>6} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9}")
        for kind, seconds in sorted(self._latencies.items()):
            told = " ".join(f"{1000 * quantile(seconds, p):9.1f}" for p in (0.5, 0.95, 0.99))
            print(f"{kind:16} {len(seconds):6} {told}")

    def print_violations(self) -> None:
        for text in self.violations[:MAX_SHOWN]:
            print(f"VIOLATION {text}")
        if len(self.violations) > MAX_SHOWN:
            print(f"... and {len(self.violations) - MAX_SHOWN} more")


def quantile(values: Sequence[float], p: float) -> float:
    """The smallest value that at least the share p of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns, the first to the left."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join([line[0].ljust(widths[0]), *rest]))

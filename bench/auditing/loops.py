"""Instructions -> the steady loop: the one over tiles that hide nothing, where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from auditing.disassembly import Code, Instruction

Body = list[Instruction]

_LONGEST_WAIT = 8
"""Instructions of a loop that does no more than ask a barrier whether it has been reached."""


@dataclass(frozen=True, slots=True)
class Steady:
    """The instructions of an iteration, in which so many tiles are computed."""

    body: Body
    tiles: int


def steady_loop(code: Code, least: float) -> Steady | None:
    """The steady loop of a kernel whose threads take `least` exponentials or more of a whole tile:
    one of each score, and what scores are made of. None if no loop does.

    Of the loops that do, those over unmasked and over masked tiles, and what a compiler splits them
    into, an unrolled loop comes before its remainder; then, the one with the least to do beside
    products is the unmasked one. If products are left to other warps, their loops are added, as if
    every warp ran them.
    """
    bodies = _innermost(code, least)
    taking = [body for body in bodies if _exponentials(body) >= least]
    if not taking:
        return None
    most, fewest = (pick(_exponentials(body) for body in taking) for pick in (max, min))
    full = [body for body in taking if _exponentials(body) > most / 2]
    body = min(full, key=_beside)
    if not _any(body, _is_matrix):
        body = body + _of_other_warps([b for b in bodies if b not in taking])
    return Steady(body, round(most / fewest))


def _of_other_warps(bodies: list[Body]) -> Body:
    """Of each other role in a kernel of specialised warps, the loop with the least to do."""
    multiply = [b for b in bodies if _any(b, _is_matrix)]
    if not multiply:
        return []
    rest = [b for b in bodies if b not in multiply]
    load = [b for b in rest if _any(b, lambda i: i.asynchronous)]
    rescale = [b for b in rest if b not in load and _any(b, lambda i: i.opcode == "LDTM")]
    return [i for role in (multiply, load, rescale) if role for i in min(role, key=_beside)]


def _is_matrix(i: Instruction) -> bool:
    return i.matrix


def _any(body: Body, has: Callable[[Instruction], bool]) -> bool:
    return any(has(i) for i in body)


def _beside(body: Body) -> int:
    return sum(not i.matrix for i in body)


def _exponentials(body: Body) -> int:
    return sum(i.exponential for i in body)


def _innermost(code: Code, least: float) -> list[Body]:
    """The loops within which no other computes tiles, without those within them that wait."""
    graph = _Graph(code)
    loops = graph.loops()
    found = []
    for header, nodes in loops.items():
        inner = [other for h, other in loops.items() if h != header and other < nodes]
        computing = (graph.body(other) for other in inner)
        if not any(_exponentials(b) >= least or _any(b, _is_matrix) for b in computing):
            waiting = set().union(*(o for o in inner if len(graph.body(o)) <= _LONGEST_WAIT))
            waiting |= {n for n in nodes if graph.only_returns(n, waiting)}
            found.append(graph.body(nodes - waiting))
    return found


class _Graph:
    """Stretches of code that run as a whole, each called by where it begins."""

    def __init__(self, code: Code) -> None:
        self.code = code.instructions
        starts = {0, *code.labels.values()}
        starts |= {at + 1 for at, i in enumerate(self.code) if i.targets or i.leaves}
        ordered = sorted(s for s in starts if s < len(self.code))
        self.ends = dict(zip(ordered, [*ordered[1:], len(self.code)], strict=True))
        self.after: dict[int, list[int]] = {}
        for start, end in self.ends.items():
            last = self.code[end - 1]
            after = [code.labels[target] for target in last.targets if target in code.labels]
            self.after[start] = [a for a in after + [end] * (not last.leaves) if a in self.ends]
        self.order = self._reached()
        self.before: dict[int, list[int]] = {start: [] for start in self.order}
        for start in self.order:
            for a in self.after[start]:
                self.before[a].append(start)

    def body(self, nodes: Iterable[int]) -> Body:
        """Less what never runs."""
        stretches = (self.code[n : self.ends[n]] for n in sorted(nodes))
        return [i for stretch in stretches for i in stretch if not i.off]

    def only_returns(self, node: int, nodes: set[int]) -> bool:
        """Whether a stretch is no more than the jump that follows some of `nodes`: ptxas moves what
        waits out of the way.
        """
        jump = self.code[node]
        lone = self.ends[node] == node + 1 and jump.leaves and bool(jump.targets)
        return lone and nodes.issuperset(self.before[node])

    def loops(self) -> dict[int, set[int]]:
        """Natural loops: header -> the stretches from it to the jumps back to it."""
        dominators = self._dominators()
        found: dict[int, set[int]] = {}
        for start in self.order:
            for header in dominators[start].intersection(self.after[start]):
                nodes = found.setdefault(header, {header})
                waiting = [start]
                while waiting:
                    node = waiting.pop()
                    if node not in nodes:
                        nodes.add(node)
                        waiting += self.before[node]
        return found

    def _dominators(self) -> dict[int, set[int]]:
        """Of each stretch, those that every way to it passes, itself included."""
        entry, *others = self.order
        found = {entry: {entry}} | {node: set(self.order) for node in others}
        changed = True
        while changed:
            changed = False
            for node in others:
                fewer = set.intersection(*(found[b] for b in self.before[node])) | {node}
                changed = changed or fewer != found[node]
                found[node] = fewer
        return found

    def _reached(self) -> list[int]:
        """The stretches that can be reached, near ones first."""
        order = [0]
        seen = {0}
        for node in order:
            fresh = [a for a in dict.fromkeys(self.after[node]) if a not in seen]
            seen.update(fresh)
            order += fresh
        return order

"""Machine code as text -> instructions, and the steady loop among them.

Written for what nvdisasm prints (SASS) and for the assembly that LLVM writes for AMD.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SASS_LABEL = re.compile(r"\s*(\.L_x?_?\w+):")
_SASS = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_SASS_JUMPS = ("BRA", "JMP", "CALL", "BRX")
_SASS_ENDS = ("EXIT", "RET")
_AMD_LABEL = re.compile(r"(\.LBB\w+):")
_AMD = re.compile(r"\t([a-z]\w+)\s*([^;]*)")

_MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "v_mfma")


@dataclass(frozen=True, slots=True)
class Instruction:
    """name is the opcode with its modifiers: "MUFU.EX2"; guard the predicate it runs under."""

    name: str
    operands: str
    guard: str | None = None
    target: str | None = None

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def off(self) -> bool:
        """Whether it never runs."""
        return self.guard in ("!PT", "!UPT")

    @property
    def matrix(self) -> bool:
        return self.name.startswith(_MATRIX)

    @property
    def exponential(self) -> bool:
        return self.name == "MUFU.EX2" or self.name.startswith("v_exp_f32")


@dataclass(frozen=True, slots=True)
class Code:
    """The instructions of a kernel in their order; labels point into it."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(listing: str) -> Code:
    """Raises ValueError when there are no instructions."""
    read = _parse_amd if "amdgcn" in listing else _parse_sass
    code = read(listing)
    if not code.instructions:
        raise ValueError("no instructions in the listing")
    return code


def _parse_sass(listing: str) -> Code:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _SASS_LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _SASS.match(line):
            guard, name, operands = found.groups()
            target = re.search(r"\((\.L_\w+)\)", operands)
            jumps = name.startswith(_SASS_JUMPS) and target is not None
            if jumps and guard is None and (re.match(r"!?U?P\d", operands) or ".DIV" in name):
                guard = operands.partition(",")[0]
            code.append(Instruction(name, operands, guard, target[1] if jumps and target else None))
    return Code(tuple(code), labels)


def _parse_amd(listing: str) -> Code:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if line.startswith(".Lfunc_end"):
            break
        if label := _AMD_LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _AMD.match(line):
            name, operands = found[1], found[2].strip()
            jumps = name.startswith(("s_branch", "s_cbranch"))
            guard = name.removeprefix("s_cbranch_") if name.startswith("s_cbranch") else None
            code.append(Instruction(name, operands, guard, operands if jumps else None))
    return Code(tuple(code), labels)


def steady_loop(code: Code) -> list[Instruction]:
    """The loop over tiles that every pair is visible in: of the innermost loops that take
    exponentials, the one with the fewest instructions beside matrix ones. Empty if there is none.

    Instructions that never run are left out, and so is what lies outside the loop's own stretch of
    addresses: there compilers put what to do while a barrier has not been reached.
    """
    bodies = [
        [i for i in body if not i.off] for body in innermost_loops(code) if _exponentials(body)
    ]
    return min(bodies, key=lambda body: sum(not i.matrix for i in body), default=[])


def _exponentials(body: Iterable[Instruction]) -> int:
    return sum(i.exponential for i in body)


def innermost_loops(code: Code) -> list[list[Instruction]]:
    """Of loops nested in each other that take exponentials, the innermost, less loops within."""
    graph = _Graph(code)
    loops = graph.loops()
    found = []
    for header, nodes in loops.items():
        inner = [o for h, o in loops.items() if h != header and o < nodes]
        taking = [o for o in inner if _exponentials(graph.body(o))]
        if not taking:
            found.append(graph.body(nodes.difference(*inner)))
    return found


class _Graph:
    """Stretches of code that run as a whole, by where they begin, and which may follow which."""

    def __init__(self, code: Code) -> None:
        self.code = code.instructions
        starts = {0, *code.labels.values()}
        starts |= {at + 1 for at, i in enumerate(self.code) if i.target or _ends(i)}
        self.starts = sorted(s for s in starts if s < len(self.code))
        self.ends = dict(zip(self.starts, [*self.starts[1:], len(self.code)], strict=True))
        self.next: dict[int, list[int]] = {}
        for start, end in self.ends.items():
            last, after = self.code[end - 1], []
            if last.target in code.labels:
                after.append(code.labels[last.target])
            if end < len(self.code) and (last.guard or not (last.target or _ends(last))):
                after.append(end)
            self.next[start] = [a for a in after if a < len(self.code)]
        self.before: dict[int, list[int]] = {s: [] for s in self.starts}
        for start, after in self.next.items():
            for a in after:
                self.before[a].append(start)

    def loops(self) -> dict[int, set[int]]:
        """Natural loops: header -> the stretches between it and the jumps back to it."""
        dominators = self._dominators()
        found: dict[int, set[int]] = {}
        for start, after in self.next.items():
            for header in after:
                if header in dominators.get(start, ()):
                    nodes = found.setdefault(header, {header})
                    open_ends = [start]
                    while open_ends:
                        node = open_ends.pop()
                        if node not in nodes:
                            nodes.add(node)
                            open_ends += [b for b in self.before[node] if b in dominators]
        return {header: self._stretch(header, nodes) for header, nodes in found.items()}

    def _stretch(self, header: int, nodes: set[int]) -> set[int]:
        """Without the nodes beyond the last jump back."""
        last = max((n for n in nodes if header in self.next[n]), default=header)
        return {n for n in nodes if header <= n <= last}

    def _dominators(self) -> dict[int, set[int]]:
        """Of each node that can be reached, those that every way to it passes."""
        order, seen = [], {0}
        stack = [0]
        while stack:
            node = stack.pop()
            order.append(node)
            fresh = [n for n in self.next[node] if n not in seen]
            seen.update(fresh)
            stack += fresh
        found = {node: set(order) for node in order}
        found[0] = {0}
        changed = True
        while changed:
            changed = False
            for node in order[1:]:
                ways = [found[b] for b in self.before[node] if b in found]
                fewer = set.intersection(*ways) | {node}
                if fewer != found[node]:
                    found[node], changed = fewer, True
        return found

    def body(self, nodes: Iterable[int]) -> list[Instruction]:
        return [i for n in sorted(nodes) for i in self.code[n : self.ends[n]]]


def _ends(i: Instruction) -> bool:
    return i.name.startswith((*_SASS_ENDS, "s_endpgm", "s_setpc"))

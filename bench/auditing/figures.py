"""All that is measured of one kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from auditing.bounds import CARDS, Bound, bound
from auditing.cases import Case, calls, is_main, name
from auditing.compiling import Compiled, compile_call
from auditing.disassembly import Instruction, parse, steady_loop

from flashwire_kernels.fused.call import Call


@dataclass(frozen=True, slots=True)
class Loop:
    """Of the steady loop, per thread: how many instructions of a kind an iteration has.

    elements   scores of a tile that fall to a thread
    per_score  instructions other than matrix ones, per score
    """

    instructions: int
    matrix: int
    matrix_names: tuple[str, ...]
    exponentials: int
    opcodes: dict[str, int]
    elements: float
    bound: Bound

    @property
    def per_score(self) -> float:
        return (self.instructions - self.matrix) / self.elements


@dataclass(frozen=True, slots=True)
class Kernel:
    """loop is that of the kernel a pass is named for; None of others, or when none was found."""

    case: Case
    name: str
    main: bool
    shape: str
    registers: int
    spilled: int
    shared: int
    seconds: float
    loop: Loop | None


def measure(case: Case) -> list[Kernel]:
    """Every kernel of a case."""
    found = []
    for call in calls(case):
        compiled = compile_call(call, case.arch)
        main = is_main(call, case.kind)
        loop = _loop(case, call, compiled) if main else None
        config, constants = call.config, call.constants
        tile = f"{constants.get('M', '')}x{constants.get('N', '')}"
        shape = f"{tile} w{config.warps} s{config.stages}{' d' if config.descriptors else ''}"
        found.append(
            Kernel(
                case,
                name(call),
                main,
                shape,
                compiled.registers,
                compiled.spilled,
                compiled.shared,
                compiled.seconds,
                loop,
            )  # fmt: skip
        )
    return found


def _loop(case: Case, call: Call, compiled: Compiled) -> Loop | None:
    body = steady_loop(parse(compiled.listing))
    if not body:
        return None
    card, warps = CARDS[case.arch], call.config.warps
    pairs = call.constants["M"] * call.constants["N"]
    threads = card.lanes * warps
    matrix = [i for i in body if i.matrix]
    exponentials = sum(i.exponential for i in body)
    dims = call.constants["DIM_PAD"], call.constants["DIM_V_PAD"]
    products = {"forward": (1, 1), "decode": (1, 1), "keys": (2, 2), "queries": (2, 1)}[case.kind]
    flops = 2 * pairs * sum(n * d for n, d in zip(products, dims, strict=True))
    half = case.width == "half"
    rate = card.tensor if half else card.tensor / 2 if matrix else card.fp32
    issued = sum(not i.name.startswith("s_") for i in body)
    return Loop(
        len(body), len(matrix), tuple(sorted({i.name for i in matrix})), exponentials,
        dict(Counter(i.opcode for i in body)), pairs / threads,
        bound(card, flops, rate, exponentials * threads, issued * warps),
    )  # fmt: skip


def opcodes(body: list[Instruction]) -> dict[str, int]:
    return dict(Counter(i.opcode for i in body))

"""All that is measured of one kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from auditing.bounds import CARDS, Bound, Card, bound
from auditing.cases import Case, calls, is_main, kernel_name, writes
from auditing.compiling import compile_call
from auditing.disassembly import Instruction, parse
from auditing.loops import Steady, steady_loop
from flashwire_kernels.fused.arguments import padded
from flashwire_kernels.fused.call import Call

_PRODUCTS = {"forward": (1, 1), "decode": (1, 1), "queries": (2, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The steady loop, counted for a thread and an iteration.

    instructions   all of them
    matrix         matrix instructions, and by what names they go
    exponentials   of base 2
    tiles          tiles that an iteration computes, more than one where it was unrolled
    scores         of a tile, those that fall to a thread
    selects        choices between numbers, NaN tests of a conversion left out
    compares       comparisons and choices of integers
    products       of those that a tile takes, the part that matrix instructions do; NaN where
                   their names do not tell
    multiply_adds  on ordinary lanes
    loads          of a word (4 bytes) from global memory into registers
    other_loads    of more or less
    narrow_stores  of less than a word to shared memory
    opcodes        how often each occurs
    """

    instructions: int
    matrix: int
    matrix_names: tuple[str, ...]
    exponentials: int
    tiles: int
    scores: float
    selects: int
    compares: int
    products: float
    multiply_adds: int
    loads: int
    other_loads: int
    narrow_stores: int
    opcodes: dict[str, int]
    bound: Bound

    @property
    def per_score(self) -> float:
        """Instructions other than matrix ones, per score."""
        return (self.instructions - self.matrix) / (self.scores * self.tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """registers and spilled bytes of a thread, shared bytes of a block; seconds of compilation,
    None where Triton's cache had the result; loop of the kernel a pass is named for, None where
    none was found. part: which of several launches of that kernel, "" of the only one.
    """

    case: Case
    name: str
    part: str
    main: bool
    launched: str
    registers: int
    spilled: int
    shared: int
    seconds: float | None
    loop: Loop | None

    def __str__(self) -> str:
        return " ".join([str(self.case), self.part if self.main else self.name]).rstrip()


def measure(case: Case) -> list[Kernel]:
    """Every kernel of a case. Raises compiling.DoesNotCompile."""
    found = []
    for call in calls(case):
        compiled = compile_call(call, case.arch)
        main = is_main(call, case.kind)
        found.append(
            Kernel(
                case=case,
                name=kernel_name(call),
                part=part_of(call) if main else "",
                main=main,
                launched=_launched(call),
                registers=compiled.registers,
                spilled=compiled.spilled,
                shared=compiled.shared,
                seconds=compiled.seconds,
                loop=read_loop(case, call, compiled.listing) if main else None,
            )
        )
    return found


def _launched(call: Call) -> str:
    """Its tile, warps, stages, and a d where there are descriptors."""
    sides = [str(call.constants[side]) for side in "MN" if side in call.constants]
    config = call.config
    return f"{'x'.join(sides)} w{config.warps} s{config.stages}{' d' * config.descriptors}"


def read_loop(case: Case, call: Call, listing: str) -> Loop | None:
    """The steady loop of what a call became."""
    card, warps = CARDS[case.arch], call.config.warps
    scores = call.constants["M"] * call.constants["N"] / (card.lanes * warps)
    each = 2 if "softcap" in case.variant.options else 1  # a tanh takes one, too
    steady = steady_loop(parse(listing), scores * each)
    if steady is None:
        return None
    body = steady.body
    matrix = [i for i in body if i.matrix]
    return Loop(
        instructions=len(body),
        matrix=len(matrix),
        matrix_names=tuple(sorted({i.name for i in matrix})),
        exponentials=sum(i.exponential for i in body),
        tiles=steady.tiles,
        scores=scores,
        selects=sum(i.selects for i in body) - sum(i.nan_test for i in body),
        compares=sum(i.compares for i in body),
        products=_on_matrix_cores(case, call, steady),
        multiply_adds=sum(i.multiply_add for i in body),
        loads=sum(i.load_width == 4 for i in body),
        other_loads=sum(i.load_width not in (0, 4) for i in body),
        narrow_stores=sum(i.narrow_store for i in body),
        opcodes=opcodes(body),
        bound=_bound(case, card, call, steady),
    )


def _bound(case: Case, card: Card, call: Call, steady: Steady) -> Bound:
    m, n = call.constants["M"], call.constants["N"]
    dim, dim_v = (padded(call.constants[name]) for name in ("DIM", "DIM_V"))
    of_q, of_v = _products(case, call)
    on_tensor_cores = any(i.matrix for i in steady.body)
    rate: float = card.tensor
    if case.width == "single":
        tf32 = call.constants["PRECISION"] == "tf32"
        rate = card.tensor / 2 if on_tensor_cores and tf32 else card.fp32
    threads = card.lanes * call.config.warps
    exponentials = sum(i.exponential for i in steady.body) * threads / steady.tiles
    issued = sum(not i.scalar for i in steady.body) * call.config.warps / steady.tiles
    return bound(card, 2 * m * n * (of_q * dim + of_v * dim_v), rate, exponentials, issued)


def _on_matrix_cores(case: Case, call: Call, steady: Steady) -> float:
    """More than 1 where warps repeat each other's products, or a head dimension is padded."""
    of_q, of_v = _products(case, call)
    c = call.constants
    taken = c["M"] * c["N"] * (of_q * c["DIM"] + of_v * c["DIM_V"]) * steady.tiles
    return sum(i.products for i in steady.body) * call.config.warps / taken


def _products(case: Case, call: Call) -> tuple[int, int]:
    """Products of a tile whose inner or outer dimension is that of q, and that of v."""
    if case.kind != "keys":
        return _PRODUCTS[case.kind]
    dk, dv = writes(call)
    return 1 + dk, dk + dv


def part_of(call: Call) -> str:
    """Where dk and dv have a launch each, which of them this is."""
    if kernel_name(call) != "keys_kernel":
        return ""
    return {(True, False): "dk", (False, True): "dv"}.get(writes(call), "")


def opcodes(body: Iterable[Instruction]) -> dict[str, int]:
    """How often each occurs, the most frequent first."""
    return dict(Counter(i.opcode for i in body).most_common())

"""Machine code as text -> instructions.

Written for what nvdisasm prints (SASS) and for the assembly that LLVM writes for AMD.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_SASS_LABEL = re.compile(r"\s*(\.L_\w+):")
_SASS = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_SASS_TARGET = re.compile(r"\.L_\w+")  # one, or a jump table's
_SASS_JUMPS = ("BRA", "BRX", "JMP", "CALL")
_AMD_LABEL = re.compile(r"(\.LBB\w+):")
_AMD = re.compile(r"\t([a-z]\w+)\s*([^;]*)")

_ENDS = ("EXIT", "RET", "BRX", "s_endpgm", "s_setpc")
_MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "v_mfma")
_HMMA = re.compile(r"HMMA\.(16)(8)(16|8|4)\b")
_SHAPED = re.compile(r"(?:HGMMA\.|v_mfma_f32_)(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")
_ASYNCHRONOUS = ("LDGSTS", "UTMALDG")
_MULTIPLY_ADDS = ("FFMA", "HFMA2", "v_fma_f", "v_fmac_f", "v_pk_fma_f", "v_dot2")


@dataclass(frozen=True, slots=True)
class Instruction:
    """name      the opcode with its modifiers: "MUFU.EX2"
    guard     the condition it runs under; None is always
    targets   the labels it may jump to
    """

    name: str
    operands: str
    guard: str | None = None
    targets: tuple[str, ...] = ()

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def off(self) -> bool:
        """Whether it never runs."""
        return self.guard in ("!PT", "!UPT")

    @property
    def leaves(self) -> bool:
        """Whether the next instruction does not follow."""
        return self.guard is None and (bool(self.targets) or self.name.startswith(_ENDS))

    @property
    def matrix(self) -> bool:
        return self.name.startswith(_MATRIX)

    @property
    def products(self) -> float:
        """Multiply-adds of a warp's share in a matrix instruction: HGMMA's are of four warps. NaN
        where the name does not tell the shape (Blackwell), 0 of other instructions.
        """
        if not self.matrix:
            return 0
        shape = _HMMA.match(self.name) or _SHAPED.match(self.name)
        if shape is None:
            return math.nan
        sides = math.prod(int(side) for side in shape.groups() if side)
        return sides / 4 if self.opcode == "HGMMA" else sides

    @property
    def scalar(self) -> bool:
        """Whether AMD's scalar unit takes it, beside a vector instruction of another wave."""
        return self.name.startswith("s_")

    @property
    def exponential(self) -> bool:
        return self.name.startswith(("MUFU.EX2", "v_exp_f32"))

    @property
    def multiply_add(self) -> bool:
        """Of numbers: one of nothing but zeros and a constant brings that into a register."""
        return self.name.startswith(_MULTIPLY_ADDS) and "-RZ, RZ" not in self.operands

    @property
    def asynchronous(self) -> bool:
        """Whether it copies from global to shared memory by itself."""
        return self.name.startswith(_ASYNCHRONOUS)

    @property
    def load_width(self) -> int:
        """Bytes of a SASS load from global memory into registers; 0 of anything else."""
        return self._width if self.opcode in ("LDG", "LD") else 0

    @property
    def narrow_store(self) -> bool:
        """Whether it brings less than a word to shared memory (SASS)."""
        return self.opcode == "STS" and self._width < 4

    @property
    def nan_test(self) -> bool:
        """A comparison with itself, which AMD's conversion to bfloat16 is made of."""
        words = [word.strip() for word in self.operands.split(",")]
        return self.name.startswith(("v_cmp_o_f32", "v_cmp_u_f32")) and words[-1] == words[-2]

    @property
    def selects(self) -> bool:
        """Whether it chooses between numbers, or compares numbers to that end."""
        return self.opcode in ("FSEL", "FSETP", "FSET", "R2P") or self.name.startswith("v_cndmask")

    @property
    def compares(self) -> bool:
        """Whether it compares or selects integers. The larger of two is no choice that could hide
        something: looking out for infinities takes one of each score.
        """
        sass = self.opcode in ("ISETP", "SEL")
        return sass or (self.name.startswith("v_cmp") and not self.nan_test)

    @property
    def _width(self) -> int:
        modifiers = self.name.split(".")
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((sizes[m] for m in modifiers if m in sizes), 4)


@dataclass(frozen=True, slots=True)
class Code:
    """The instructions of a kernel in their order; labels point into it."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(listing: str) -> Code:
    """Raises ValueError when there are no instructions."""
    code = (_parse_amd if ".amdgcn_target" in listing else _parse_sass)(listing)
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
            targets = _SASS_TARGET.findall(operands) if name.startswith(_SASS_JUMPS) else []
            if targets and guard is None and (re.match(r"!?U?P\d", operands) or ".DIV" in name):
                guard = operands.partition(",")[0]
            code.append(Instruction(name, operands, guard, tuple(targets)))
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
            guard = name if name.startswith("s_cbranch") else None
            code.append(Instruction(name, operands, guard, (operands,) if jumps else ()))
    return Code(tuple(code), labels)

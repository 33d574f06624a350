"""Figures -> what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

from auditing.cases import Case
from auditing.figures import Kernel, Loop

from flashwire_kernels.fused.config import SHARED_BYTES, family

PER_SCORE = {"sm_80": 10.0, "sm_90": 8.0, "sm_100": 8.0}
"""Instructions other than matrix ones per score: forward, steady loop, D of 64 and 128."""

TENSOR = {"sm_90": "HGMMA", "sm_100": "UTC", "gfx942": "v_mfma"}


def violations(kernel: Kernel) -> Iterator[str]:
    """Every rule that a kernel breaks, in words."""
    case = kernel.case
    limit = SHARED_BYTES[family(case.arch)]
    if kernel.shared > limit:
        yield f"needs {kernel.shared} bytes of shared memory, {limit} are there"
    if kernel.spilled and case.kind == "forward" and case.dim <= 128:
        yield f"spills {kernel.spilled} bytes"
    if kernel.main and kernel.loop is None:
        yield "has no loop that takes exponentials"
    if kernel.main and kernel.loop is not None:
        yield from _of_loop(case, kernel.loop)


def _of_loop(case: Case, loop: Loop) -> Iterator[str]:
    plain = case.variant.name in ("dense", "causal", "single", "grouped")
    if case.width == "half" or case.variant.name == "tf32":
        wanted = TENSOR.get(case.arch, "HMMA")
        if not loop.matrix:
            yield "has no tensor-core instructions"
        elif case.kind == "forward" and not all(n.startswith(wanted) for n in loop.matrix_names):
            yield f"uses {', '.join(loop.matrix_names)} in place of {wanted}"
    if not plain or case.arch.startswith("gfx"):
        return
    masks = {op: loop.opcodes.get(op, 0) for op in ("FSEL", "FSETP")}
    if any(masks.values()):
        yield f"has mask arithmetic where nothing is hidden: {masks}"
    if case.width == "half" and loop.opcodes.get("LDG", 0):
        yield f"loads {loop.opcodes['LDG']} times past the asynchronous copies"
    most = PER_SCORE.get(case.arch)
    if case.kind == "forward" and case.width == "half" and case.dim <= 128 and most is not None:
        if loop.per_score > most:
            yield f"takes {loop.per_score:.2f} instructions per score, at most {most:g} allowed"

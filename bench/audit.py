"""Compile the GPU kernels ahead of time, without a GPU, and show what the compiler made of them.

    python bench/audit.py [--arch sm_90 ...] [--dim 64 128] [--pass forward ...]

One line per kernel: registers, spilled bytes, shared memory; and of its steady loop, in which every
pair is visible, matrix and exponential instructions and all others per score element.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels.fused import backward, decode, forward, gradients
from flashwire_kernels.fused.arguments import padded
from flashwire_kernels.fused.call import Call
from flashwire_kernels.fused.config import PASSES, Pass, choose
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.testing import resolve_tensors
from flashwire_kernels.types import AttentionSpec

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip
MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "UTCMMA")


def target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def source(call: Call) -> ASTSource:
    """The kernel specialised as the launch would specialise it."""
    free = {p.name for p in call.kernel.params if p.do_not_specialize}
    constants: dict[Any, Any] = {}
    hints: dict[Any, Any] = {}

    def describe(path: tuple[int, ...], value: Any, specialise: bool) -> Any:
        if isinstance(value, tuple):
            parts = [describe((*path, i), v, specialise) for i, v in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
        if isinstance(value, torch.Tensor):
            hints[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if value is None or (specialise and value == 1 and isinstance(value, int)):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if specialise and value % 16 == 0:
            hints[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    names = call.kernel.arg_names
    signature = {
        name: describe((i,), value, name not in free)
        for i, (name, value) in enumerate(zip(names, call.positional, strict=False))
    }
    for name, value in call.constants.items():
        signature[name] = "constexpr"
        constants[(names.index(name),)] = value
    return ASTSource(call.kernel, signature, constants, hints)


def calls(kind: Pass, arch: str, dtype: torch.dtype, dim: int, **options: Any) -> list[Call]:
    """What a pass launches on q, k, v (4, 16, 4096, dim)."""
    q = torch.empty((4, 16, 4096, dim), dtype=dtype, device="meta")
    k = q
    if kind == "decode":
        q = torch.empty((4, 16, 1, dim), dtype=dtype, device="meta")
    tensors = {"q": q, "k": k, "v": k}
    problem, x = resolve_tensors(AttentionSpec(**options), tensors), Inputs(**tensors)
    lse = torch.empty(q.shape[:-1], device="meta")
    config = choose(kind, arch, q.element_size(), padded(dim), modified=False)
    saved = (q, lse, lse)
    if kind == "forward":
        infinite = torch.empty(k.shape[:-1], dtype=torch.int32, device="meta")
        return [forward.call(problem, x, infinite, q, lse, config)]
    if kind == "decode":
        return list(decode.calls(problem, x, q, lse, config))
    if kind == "keys":
        return [backward.keys_call(problem, x, saved, (q, q), None, config)]
    return [
        gradients.delta_call(problem, q, lse, q, None, lse, config),
        backward.queries_call(problem, x, saved, None, q, None, None, config),
    ]


def steady_loop(listing: str) -> list[str]:
    """Opcodes of the loop with matrix instructions that has the fewest others."""
    code, labels = [], {}
    for line in listing.splitlines():
        label = re.match(r"\s*(\.L_x?_?\w+):", line)
        found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = len(code)
        elif found:
            code.append(found[1])
    loops = []
    for at, text in enumerate(code):
        jump = re.search(r"BRA.*?`?\(?(\.L_x?_?\w+)\)?", text)
        if jump and labels.get(jump[1], at + 1) <= at:
            loop = code[labels[jump[1]] : at + 1]
            if any(op in t for t in loop for op in MATRIX):
                loops.append(loop)
    if not loops:
        return []
    loop = min(loops, key=len)
    return [re.sub(r"^@!?U?P\w+\s+", "", t).split()[0] for t in loop]


def audit(name: str, call: Call, arch: str) -> Counter:
    began = time.perf_counter()
    compiled = triton.compile(source(call), target=target(arch), options=call.config.options)
    took = time.perf_counter() - began
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", f.name], capture_output=True,
                               text=True, check=True).stdout  # fmt: skip
        listing = subprocess.run([TOOLS / "nvdisasm", "-c", f.name], capture_output=True,
                                 text=True, check=True).stdout  # fmt: skip
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    spills = int(re.search(r"LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1])
    loop = steady_loop(listing)
    ops = Counter(op.split(".")[0] for op in loop)
    matrix = sum(n for op, n in ops.items() if op in MATRIX)
    per = call.config.m * call.config.n / (32 * call.config.warps)
    print(
        f"{name:34} {call.config.m:3}x{call.config.n:<3} w{call.config.warps} s{call.config.stages}"
        f" regs {registers:3} spill {spills:4} smem {compiled.metadata.shared:6}"
        f" mma {matrix:3} mufu {ops['MUFU']:3} other/el {(len(loop) - matrix) / per:5.2f}"
        f" ldg {ops['LDG']} sts {ops['STS']} {took:4.1f} s",
        flush=True,
    )
    return ops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90", "sm_100"])
    parser.add_argument("--dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--pass", nargs="+", dest="kinds", default=PASSES)
    parser.add_argument("--classes", action="store_true", help="count the loop's opcodes")
    chosen = parser.parse_args()
    for arch in chosen.arch:
        for kind in chosen.kinds:
            for dim in chosen.dim:
                for causal in (False, True):
                    for call in calls(kind, arch, torch.bfloat16, dim, causal=causal):
                        name = f"{arch} {call.kernel.__name__} d{dim} causal={int(causal)}"
                        ops = audit(name, call, arch)
                        if chosen.classes:
                            print("   ", dict(ops.most_common()))


if __name__ == "__main__":
    main()

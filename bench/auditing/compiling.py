"""A call compiled ahead of time, as a launch would compile it, for a GPU that need not be there."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels.fused.call import Call

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


class DoesNotCompile(Exception):
    """A compiler refused a kernel; the message is its own."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """registers and spilled bytes of a thread, shared bytes of a block; seconds that compilation
    took, None where the result lay in Triton's cache.
    """

    listing: str
    registers: int
    spilled: int
    shared: int
    seconds: float | None


def build(call: Call, arch: str) -> Any:
    """Triton's own object. Raises DoesNotCompile."""
    with own_words():
        return triton.compile(source(call, arch), target=_target(arch), options=call.config.options)


def compile_call(call: Call, arch: str) -> Compiled:
    """Raises DoesNotCompile."""
    seconds: list[float | None] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        stages = sum(microseconds for _, microseconds in times.lowering_stages)
        seconds.append(None if cache_hit else (times.ir_initialization + stages) / 1e6)

    with mock.patch.object(knobs.compilation, "listener", listen):
        found = build(call, arch)
    read = _read_hip if arch.startswith("gfx") else _read_cuda
    return Compiled(*read(found.asm), found.metadata.shared, seconds[0])


@contextlib.contextmanager
def own_words() -> Iterator[None]:
    """What a compiler says on stderr, which are pages, becomes one line of an exception."""
    with tempfile.TemporaryFile("w+") as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except Exception as error:
            said.seek(0)
            words = re.search(r"error: (.*)", said.read())
            raise DoesNotCompile(
                words[1] if words else f"{type(error).__name__}: {error}"
            ) from error
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def source(call: Call, arch: str) -> ASTSource:
    """The kernel specialised as the launch would specialise it."""
    free = {p.name for p in call.kernel.params if p.do_not_specialize}
    constants: dict[Any, Any] = {}
    hints: dict[Any, Any] = {}
    describe = functools.partial(_describe, constants, hints, arch)
    names = call.kernel.arg_names
    signature = {
        name: describe((i,), value, name not in free)
        for i, (name, value) in enumerate(zip(names, call.positional, strict=False))
    }
    for name, value in call.constants.items():
        signature[name] = "constexpr"
        constants[(names.index(name),)] = value
    return ASTSource(call.kernel, signature, constants, hints)


def _describe(
    constants: dict[Any, Any],
    hints: dict[Any, Any],
    arch: str,
    path: tuple[int, ...],
    value: Any,
    specialise: bool,
) -> Any:
    """The type of an argument as Triton writes it; what else is known goes into the dicts."""
    if isinstance(value, tuple):
        parts = [
            _describe(constants, hints, arch, (*path, i), v, specialise)
            for i, v in enumerate(value)
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        hints[path] = _known(value, arch)
        return _POINTERS[value.dtype]
    if value is None or (specialise and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if specialise and value % 16 == 0:
        hints[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _known(t: torch.Tensor, arch: str) -> list[list[Any]]:
    """What a launch finds out about a tensor: torch aligns its memory, AMD's compiler asks for its
    size.
    """
    known: list[list[Any]] = [["tt.divisibility", 16]]
    if arch.startswith("gfx") and t.untyped_storage().nbytes() < 2**31:
        known.append(["tt.pointer_range", 32])
    return known


def _target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def _read_cuda(asm: dict[str, Any]) -> tuple[str, int, int]:
    """(listing, registers, spilled bytes)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(asm["cubin"])
        f.flush()
        usage, listing = (
            subprocess.run(
                [_TOOLS / tool, option, f.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    return listing, _number(r"REG:(\d+)", usage), spilled_bytes(usage, listing)


def spilled_bytes(usage: str, listing: str) -> int:
    """What cuobjdump -res-usage says of a kernel's frame. ptxas spills into it, which it counts as
    STACK; a frame that nothing is stored in is none of our doing.
    """
    frame = _number(r"LOCAL:(\d+)", usage) + _number(r"STACK:(\d+)", usage)
    return frame if re.search(r"\bSTL\b", listing) else 0


def _read_hip(asm: dict[str, Any]) -> tuple[str, int, int]:
    """(listing, vector and accumulation registers, spilled bytes)."""
    listing = asm["amdgcn"]
    return listing, _number(r"\.vgpr_count: +(\d+)", listing), spilled_bytes_of_hip(listing)


def spilled_bytes_of_hip(listing: str) -> int:
    """The private segment, if anything is stored in it: scalar registers move to lanes of vector
    ones, and room for that to go wrong is kept there.
    """
    frame = _number(r"\.private_segment_fixed_size: +(\d+)", listing)
    return frame if re.search(r"\bscratch_store", listing) else 0


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in what the tools print")
    return int(found[1])

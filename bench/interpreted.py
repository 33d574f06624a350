"""Triton's kernels on the CPU, by its interpreter: what it lacks, and what it does too slowly.

For tests and dry runs. TRITON_INTERPRET=1 must be set before triton's kernels are imported.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch


class Patch(Protocol):
    """What sets an attribute: pytest's monkeypatch, or `Lasting`."""

    def setattr(self, target: Any, name: str, value: Any) -> None: ...


class Lasting:
    """A patch that is never undone, for a process that only interprets."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)


def interpret_bfloat16(patch: Patch) -> None:
    """Triton's interpreter holds bfloat16 as uint16: it multiplies those, and truncates to them."""
    from triton.runtime import interpreter

    bf16, f32 = interpreter.tl.bfloat16, interpreter.tl.float32
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(values, source, target, rounding):
        if (source, target) == (bf16, f32):
            return values.astype(np.uint32) << 16
        if (source, target) == (f32, bf16):
            found = torch.from_numpy(np.array(values)).to(torch.bfloat16)
            return found.view(torch.int16).numpy()
        return convert(values, source, target, rounding)

    def create_dot(self, a, b, *rest):
        a, b = (self.cast_impl(t, f32) if t.dtype.scalar == bf16 else t for t in (a, b))
        return dot(self, a, b, *rest)

    patch.setattr(interpreter, "_convert_float", convert_float)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def interpret_helpers_once(patch: Patch) -> None:
    """Triton's interpreter patches all of triton.language each time a kernel calls a jit function:
    once per launch is enough, and many times faster.
    """
    from triton.runtime import interpreter

    original, patched = interpreter._patch_lang, set()

    def patch_lang(fn):
        found = fn.__globals__.values()
        modules = tuple(m in found for m in (interpreter.tl, interpreter.tl.core))
        if modules in patched:
            return None
        patched.add(modules)
        scope = original(fn)
        restore = scope.restore
        scope.restore = lambda: (restore(), patched.discard(modules))
        return scope

    patch.setattr(interpreter, "_patch_lang", patch_lang)

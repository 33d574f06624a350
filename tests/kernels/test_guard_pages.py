"""Triton kernels between pages that may not be touched.

What test_bounds.py shows of addresses, the machine's own protection of memory shows here of
accesses, of the interpreter's masked lanes too: a process that runs this file dies at the first
byte beyond a tensor.
"""

import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton._utils import _tuple_create
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels.check import check
from flashwire_kernels.testing import Case, make

PAGE = mmap.PAGESIZE
PROTECT_NONE = 0  # PROT_NONE
EDGES = ("start", "end")

ODD = {"heads_q": 3, "heads_kv": 1, "dim": 40, "dim_v": 24, "sinks": True, "poison": True}
CASES = {
    "plain": Case(heads_q=1, heads_kv=1, len_q=129, len_k=130, dim=64, dtype="bfloat16",
                  layout="blhd"),
    "all options": Case(**ODD, batch=1, len_q=65, len_k=63, window=(40, 9), softcap=2.0,
                        alibi="bh", mask="bhqk", bias="1hqk", dropout=0.3),
    "packed": Case(**ODD, lens_q=(1, 0, 65), lens_k=(65, 1, 63), padding=2, causal=True,
                   mask="k", bias="q1", dropout=0.3),
    "decode": Case(**ODD, len_q=3, len_k=131, mask="b1qk", bias="b11k"),
    "packed decode": Case(**ODD, lens_q=(2, 0, 1), lens_k=(129, 70, 0), dtype="float16"),
    "no keys": Case(**ODD, len_q=64, len_k=0, mask="1hq1"),
    "no queries": Case(**ODD, len_q=0, len_k=64),
    "single": Case(**ODD, len_q=1, len_k=1, batch=1),
}  # fmt: skip


class Guards:
    """Launches kernels on copies of their tensors whose first or last byte borders on a page that
    may not be touched.
    """

    def __init__(self, edge):
        self.edge, self.memory, self.copies = edge, [], []

    def install(self, patch):
        executor = interpreter.GridExecutor
        patch.setattr(executor, "_init_args_hst", lambda _, *args: tuple(map(self.copy, args)))
        patch.setattr(executor, "_restore_args_dev", lambda *_: self.restore())

    def copy(self, arg):
        if isinstance(arg, dict):
            return {name: self.copy(value) for name, value in arg.items()}
        if isinstance(arg, list):
            return [self.copy(value) for value in arg]
        if isinstance(arg, tuple):
            return _tuple_create(arg, map(self.copy, arg))
        if isinstance(arg, TensorDescriptor):
            base = self.tensor(arg.base, alignment=16)
            return TensorDescriptor(base, arg.shape, arg.strides, arg.block_shape)
        return self.tensor(arg) if isinstance(arg, torch.Tensor) else arg

    def tensor(self, t, alignment=1):
        if not t.numel():
            return t
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        flat = t.as_strided((span,), (1,))
        copy = torch.frombuffer(self.bytes(span * t.element_size(), alignment), dtype=t.dtype)
        self.copies.append((flat, copy.copy_(flat)))
        return copy.as_strided(t.shape, t.stride())

    def bytes(self, n, alignment):
        """n bytes of pages between two that may not be touched, at the edge."""
        room = -(-n // PAGE) * PAGE
        memory = mmap.mmap(-1, room + 2 * PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for guard in (first, first + PAGE + room):
            protect(guard)
        self.memory.append(memory)  # in use for as long as this process runs
        before = 0 if self.edge == "start" else (room - n) // alignment * alignment
        return (ctypes.c_char * n).from_address(first + PAGE + before)

    def restore(self):
        for original, copy in self.copies:
            original.copy_(copy)
        self.copies.clear()


def protect(address):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.mprotect(address, PAGE, PROTECT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


@triton.jit
def copy_kernel(source, target, first, rows, N: tl.constexpr):
    at = first + tl.arange(0, N)
    tl.store(target + at, tl.load(source + at, mask=at < rows), mask=at < rows)


WRONG = {"first": -1}, {"rows": 21}


def run_right(edge, patch):
    """Every case, its name first."""
    Guards(edge).install(patch)
    patch.setattr("flashwire_kernels.fused.infinite.COUNT_FROM", 64)
    for name, case in CASES.items():
        print(name, flush=True)
        call = make(case)
        report = check(
            **call.tensors,
            spec=call.spec,
            dout=call.dout,
            dlse=call.dlse,
            backends=("triton", "reference"),
        )
        assert report.passed, report


def run_wrong(edge, wrong, patch):
    Guards(edge).install(patch)
    copy_kernel[(1,)](torch.ones(20), torch.ones(20), **{"first": 0, "rows": 20} | wrong, N=32)


def alone(*arguments):
    """This file in a process of its own."""
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize("edge", EDGES)
def test_no_kernel_touches_a_guard(edge):
    done = alone(edge)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == list(CASES)


@pytest.mark.parametrize(("edge", "wrong"), [("start", "0"), ("end", "1")])
def test_the_guards_kill(edge, wrong):
    done = alone(edge, wrong)
    assert done.returncode == -signal.SIGSEGV
    assert "in copy_kernel" in done.stderr


def main(edge, wrong=None):
    faulthandler.enable()
    from conftest import interpret

    patch = pytest.MonkeyPatch()
    interpret(patch)
    if wrong is None:
        run_right(edge, patch)
    else:
        run_wrong(edge, WRONG[int(wrong)], patch)


if __name__ == "__main__":
    main(*sys.argv[1:])

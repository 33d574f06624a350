"""Triton kernels touch elements of their tensors only, and write each of them once.

The interpreter is given addresses that are not real: every tensor has a space of its own, far from
all others. So an access tells which tensor it means, and an element of a view can be told from what
else lies in the view's memory.
"""

import dataclasses
import importlib
import math
import mmap
import pkgutil

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels import api, fused
from flashwire_kernels.check import check
from flashwire_kernels.fused import config
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.testing import Case, make, pairwise

SPACE = 1 << 44
"""Bytes of addresses for each tensor. Its first element is in their middle."""

NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python does not name


class Fault(Exception):
    """An access that a kernel must not make."""


class Region:
    """The elements of a tensor, by their distance from its first one."""

    def __init__(self, tensor, number):
        self.tensor, self.item = tensor, tensor.element_size()
        self.real = tensor.data_ptr()
        self.base = number * SPACE + SPACE // 2 + self.real % 64
        distances = np.zeros(1, np.int64)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            distances = np.add.outer(distances, np.arange(size) * stride).ravel()
        self.distances = np.unique(distances)
        self.read = np.zeros(self.distances.size, bool)
        self.writes = np.zeros(self.distances.size, np.int32)

    def __str__(self):
        t = self.tensor
        return f"a {t.dtype} tensor of shape {tuple(t.shape)} and strides {tuple(t.stride())}"

    def elements(self, addresses):
        """The places of elements in `distances`."""
        where = addresses.astype(np.int64) - self.base
        wanted = where // self.item
        found = np.searchsorted(self.distances, wanted)
        exact = found < self.distances.size
        exact[exact] = self.distances[found[exact]] == wanted[exact]
        exact &= where % self.item == 0
        if not exact.all():
            raise Fault(f"outside of {self}: {where[~exact][:4]} bytes from its first element")
        return found

    def overlaps(self, other):
        if not self.distances.size or not other.distances.size:
            return False
        ends = [r.real + (int(r.distances[-1]) + 1) * r.item for r in (self, other)]
        return self.real < ends[1] and other.real < ends[0]


class Watch:
    """Stops at every fault of the kernels that are launched while it is installed.

    launched  the names of kernels
    partial   (kernel, tensor) where a kernel wrote some elements and not others
    """

    def __init__(self, patch):
        self.launched, self.partial, self.regions = set(), [], []
        builder = interpreter.InterpreterBuilder
        for owner, name, method in (
            (interpreter.GridExecutor, "__call__", self._launch),
            (interpreter, "_implicit_cvt", self._argument),
            (builder, "create_masked_load", self._load),
            (builder, "create_masked_store", self._store),
            (builder, "create_atomic_rmw", self._atomic),
            (builder, "create_atomic_cas", self._atomic),
        ):
            patch.setattr(owner, name, _around(getattr(owner, name), method))

    def _launch(self, original, executor, *args, **kwargs):
        self.regions, name = [], executor.fn.__name__
        original(executor, *args, **kwargs)
        self.launched.add(name)
        for region in (r for r in self.regions if r.writes.any()):
            if (region.read & (region.writes > 0)).any():
                raise Fault(f"{name} reads what it writes, in whatever order: {region}")
            if any(region.overlaps(r) for r in self.regions if r is not region):
                raise Fault(f"{name} is given the memory of {region} twice")
            if not region.writes.all():
                self.partial.append((name, str(region)))

    def _argument(self, original, arg):
        """A tensor as a kernel sees it."""
        seen = original(arg)
        if hasattr(arg, "data_ptr"):
            self.regions.append(Region(arg, len(self.regions) + 1))
            seen.handle.data[:] = self.regions[-1].base
        return seen

    def _access(self, pointers, mask):
        """(region, elements, real pointers); None and nothing where no lane is wanted."""
        wanted = np.asarray(mask.data).astype(bool)  # the interpreter has masks of int32, too
        addresses = pointers.data[wanted]
        if not addresses.size:
            return None, None, pointers
        first, last = (int(address) // SPACE for address in (addresses.min(), addresses.max()))
        if first != last or not 0 < first <= len(self.regions):
            raise Fault("outside of all tensors")
        region = self.regions[first - 1]
        if pointers.get_element_ty().primitive_bitwidth != 8 * region.item:
            raise Fault(f"{region} seen as {pointers.dtype}")
        real = pointers.data + np.uint64((region.real - region.base) % 2**64)
        return region, region.elements(addresses), interpreter.TensorHandle(real, pointers.dtype)

    def _load(self, original, builder, pointers, mask, *rest, **more):
        region, found, real = self._access(pointers, mask)
        if region:
            region.read[found] = True
        return original(builder, real, mask, *rest, **more)

    def _store(self, original, builder, pointers, value, mask, *rest, **more):
        region, found, real = self._access(pointers, mask)
        if region:
            if value.data.itemsize != region.item:
                raise Fault(f"{value.data.itemsize} bytes written to {region}")
            np.add.at(region.writes, found, 1)
            if region.writes[found].max() > 1:
                raise Fault(f"an element is written twice, in whatever order: {region}")
        return original(builder, real, value, mask, *rest, **more)

    def _atomic(self, *args):
        raise Fault("an atomic: what it leaves may depend on the order of programs")


def _around(original, method):
    return lambda *args, **kwargs: method(original, *args, **kwargs)


@pytest.fixture
def watch(interpreted, monkeypatch):
    return Watch(monkeypatch)


def whole(t):
    """As it is."""
    return t


def sliced(t):
    """From the middle of a larger tensor, in every dimension. Rows that start at multiples of 16
    bytes still do, so that descriptors remain possible.
    """
    margins = [1] * (t.dim() - 1) + [8]
    shape = [n + 2 * m for n, m in zip(t.shape, margins, strict=True)]
    memory = torch.full(shape, math.nan if t.is_floating_point() else 1, dtype=t.dtype)
    return memory[tuple(slice(m, -m) for m in margins)].copy_(t)


def turned(t):
    """With dimensions in reversed order, and gaps between elements."""
    shape = (*reversed(t.shape), 3)
    memory = torch.full(shape, math.nan if t.is_floating_point() else 1, dtype=t.dtype)
    return memory[..., 1].permute(*reversed(range(t.dim()))).copy_(t)


def far_rows(t):
    """2**32 elements and more from the first to the last along every dimension but the last, by
    strides that are 32-bit integers.
    """
    return _far(t, [_far_stride(n, d) for d, n in enumerate(t.shape[:-1])] + [1])


def far_dims(t):
    """The same along the last dimension."""
    block = t.shape[:-1].numel()
    strides = torch.empty(t.shape[:-1], device="meta").stride()
    return _far(t, [*strides, block + _far_stride(t.shape[-1], 0)])


def _far_stride(size, dimension):
    return min(2**31, 2**32 // max(1, size - 1)) - 4096 * 4**dimension


def _far(t, strides):
    span = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, span * t.element_size(), flags=flags)  # takes only what is written to
    return torch.frombuffer(memory, dtype=t.dtype).as_strided(t.shape, strides).copy_(t)


def results(call, place=whole):
    """All that forward and backward give for tensors that `place` has put somewhere."""
    t = {name: t if name.startswith("cu_") else _put(t, place) for name, t in call.tensors.items()}
    found = api.forward(**t, spec=call.spec, backend="triton")
    saved = {"out": found.out, "lse": found.lse}
    g = api.backward(
        place(call.dout),
        **t,
        **{name: place(tensor) for name, tensor in saved.items()},
        dlse=None if call.dlse is None else place(call.dlse),
        wanted=Wanted(bias="bias" in t, sinks="sinks" in t),
        spec=call.spec,
        backend="triton",
    ).gradients
    gradients = {f.name: getattr(g, f.name) for f in dataclasses.fields(g)}
    return saved | {name: t for name, t in gradients.items() if t is not None}


def _put(t, place):
    return place(t) if t.dim() else t


def assert_right(call, place):
    """Within the budget, so that nothing has been left unwritten either: memory was full of NaN."""
    found = results(call, place)
    report = check(**call.tensors, spec=call.spec, dout=call.dout, dlse=call.dlse, mine=found)
    assert not {name: c for name, c in report.tensors.items() if not c.passed}


def use(patch, tiles):
    """Have every pass take tiles of (m, n), and decode when there are more than 64 keys."""
    m, n = tiles
    chosen = config.Config(m=m, n=n, split=max(64, n), descriptors=True)
    patch.setattr(config, "choose", lambda *args, **kwargs: chosen)


GRID = {
    "lengths": [
        {"len_q": 65, "len_k": 63}, {"len_q": 1, "len_k": 64}, {"len_q": 64, "len_k": 1},
        {"len_q": 63, "len_k": 65}, {"len_q": 0, "len_k": 65}, {"len_q": 65, "len_k": 0},
        {"len_q": 3, "len_k": 131},
        {"lens_q": (1, 0, 65, 3), "lens_k": (65, 1, 63, 0), "padding": 2},
        {"lens_q": (2, 0, 1, 5), "lens_k": (129, 70, 0, 3), "padding": 2},
        {"lens_q": (0, 0), "lens_k": (0, 5), "padding": 1}],
    "place": [whole, sliced, turned],
    "heads": [(2, 2, 2), (1, 3, 1)],
    "dims": [(40, 24), (16, 32), (3, 17)],
    "dtype": ["float32", "bfloat16"],
    "causal": [False, True],
    "causal_align": ["bottom_right", "top_left"],
    "window": [None, (30, 9), (None, 3), (2, None)],
    "softcap": [None, 2.0],
    "dropout": [0.0, 0.3],
    "alibi": [None, "h", "bh"],
    "sinks": [False, True],
    "mask": [None, "bhqk", "b1qk", "k", "1hq1"],
    "bias": [None, "bhqk", "1hqk", "b11k", "q1"],
    "dlse": [True, False],
    "poison": [True, False],
    "tiles": [(64, 64), (32, 32), (16, 128)],
    "counted": [False, True],
}  # fmt: skip
BROADCASTS = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "b11k", "1h1k", "k", "bhq1", "1hq1", "q1",
              "bh11", "1111", "1", "")  # fmt: skip


KEPT = 16
"""Of the rows, which come with most new pairs first, so many run in `make test`."""


def grid_row(index, lengths, place, heads, dims, tiles, counted, **options):
    sizes = dict(zip(("batch", "heads_q", "heads_kv", "dim", "dim_v"), heads + dims, strict=True))
    marks = [pytest.mark.long] if index >= KEPT else []
    return pytest.param(Case(**lengths, **sizes, **options), place, tiles, counted, marks=marks)


@pytest.mark.parametrize(
    ("case", "place", "tiles", "counted"),
    [grid_row(index, **row) for index, row in enumerate(pairwise(GRID))],
)
def test_every_pair_of_options(case, place, tiles, counted, watch, monkeypatch):
    use(monkeypatch, tiles)
    if counted:
        monkeypatch.setattr("flashwire_kernels.fused.infinite.COUNT_FROM", 1)
    assert_right(make(case), place)
    assert case.lens_q is not None or not watch.partial


@pytest.mark.long
@pytest.mark.parametrize("lengths", GRID["lengths"][3::4], ids=str)
@pytest.mark.parametrize("letters", BROADCASTS)
def test_masks_and_biases_of_every_shape(letters, lengths, watch):
    case = Case(**lengths, mask=letters, bias=letters, dim=40, dim_v=24, heads_q=4, heads_kv=2)
    assert_right(make(case), sliced)


FAR = {
    "dense": {"batch": 3, "len_q": 20, "len_k": 9, "alibi": "bh", "mask": "bhqk", "bias": "bhqk"},
    "packed": {"lens_q": (9, 0, 3), "lens_k": (9, 3, 35), "dropout": 0.2},
    "decode": {"batch": 3, "len_q": 3, "len_k": 67, "mask": "bhqk"},
}


@pytest.mark.parametrize("place", [far_rows, far_dims])
@pytest.mark.parametrize("options", FAR.values(), ids=FAR)
def test_distances_beyond_32_bits(options, place, watch, monkeypatch):
    use(monkeypatch, (16, 32))
    assert_right(make(Case(**options, heads_q=3, heads_kv=3, dim=40, causal=True)), place)


def test_all_kernels_are_watched(watch, monkeypatch):
    monkeypatch.setattr("flashwire_kernels.fused.infinite.COUNT_FROM", 1)
    for case in (Case(), Case(len_q=1, len_k=80), Case(bias="qk")):
        results(make(case))
    modules = [
        importlib.import_module(f"{fused.__name__}.{module.name}")
        for module in pkgutil.iter_modules(fused.__path__)
    ]
    kernels = {name for m in modules for name in vars(m) if name.endswith("_kernel")}
    assert kernels == watch.launched


@triton.jit
def copy_kernel(source, target, first, step, source_rows, target_rows, N: tl.constexpr):
    """Every program N elements, `step` after those of the one before."""
    at = first + tl.program_id(0) * step + tl.arange(0, N)
    tl.store(target + at, tl.load(source + at, mask=at < source_rows), mask=at < target_rows)


@triton.jit
def described_kernel(source, target, N: tl.constexpr):
    tl.store(target + tl.arange(0, N), source.load([0]), mask=tl.arange(0, N) < 20)


@triton.jit
def atomic_kernel(target):
    tl.atomic_add(target, 1.0)


RIGHT = {"first": 0, "step": 16, "source_rows": 20, "target_rows": 20}


def numbers(n, step=1):
    return torch.arange(n * step, dtype=torch.float32)[::step]


def test_what_is_right_passes(watch):
    source, target = numbers(20), numbers(20)
    copy_kernel[(2,)](source, target.zero_(), **RIGHT, N=16)
    assert torch.equal(source, target)
    assert watch.launched == {"copy_kernel"}
    assert not watch.partial


@pytest.mark.parametrize(("wrong", "message"), [
    ({"source_rows": 32}, "outside of a torch.float32 .* bytes"),
    ({"target_rows": 32}, "outside of a torch.float32 .* bytes"),
    ({"first": -1}, "outside of a torch.float32 .* bytes"),
    ({"first": -(2**40)}, "outside of a torch.float32 .* bytes"),
    ({"first": -(2**43)}, "outside of all tensors"),
    ({"step": 15}, "written twice")], ids=str)  # fmt: skip
def test_wrong_indices_are_seen(wrong, message, watch):
    with pytest.raises(InterpreterError, match=message):
        copy_kernel[(2,)](numbers(20), numbers(20), **RIGHT | wrong, N=16)


def test_reading_between_the_elements_of_a_view_is_seen(watch):
    with pytest.raises(InterpreterError, match=r"outside of a .* \[ 4 12 20 28\] bytes"):
        copy_kernel[(2,)](numbers(20, 2), numbers(20), **RIGHT, N=16)


def test_reading_what_others_write_is_seen(watch):
    both = numbers(40)
    with pytest.raises(Fault, match="is given the memory of"):
        copy_kernel[(2,)](both[:20], both[19:39], **RIGHT, N=16)


def test_a_descriptor_of_more_than_there_is_is_seen(watch):
    source = TensorDescriptor(numbers(20), [32], [1], [32])
    with pytest.raises(InterpreterError, match="outside of a"):
        described_kernel[(1,)](source, numbers(20), N=32)


def test_an_atomic_is_seen(watch):
    with pytest.raises(InterpreterError, match="atomic"):
        atomic_kernel[(1,)](numbers(1))


def test_a_part_that_is_not_written_is_seen(watch):
    copy_kernel[(1,)](numbers(20), numbers(20), **RIGHT, N=16)
    assert [name for name, _ in watch.partial] == ["copy_kernel"]

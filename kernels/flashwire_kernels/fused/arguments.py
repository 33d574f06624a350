"""What the kernels take: tensors with their strides, and the options, grouped by name.

Strides count elements. A member that is None is absent from the compiled kernel.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flashwire_kernels.fused.config import Config
from flashwire_kernels.fused.support import precision
from flashwire_kernels.geometry import Band
from flashwire_kernels.tensors import Inputs
from flashwire_kernels.types import ITEM_SIZE
from flashwire_kernels.validation import Problem

LOG2E = math.log2(math.e)
_LEAST_FOLDED_SCALE = 2.0**-60
_CACHE_BYTES = 16 << 20  # of keys and values that programs in flight should share
_SOFTCAP_RANGE = (2.0**-80, 2.0**80)  # beyond, float32 sees a constant 0 or no cap at all


class Rows(NamedTuple):
    """A row per token: (B, H, L, D), or (T, H, D) with `batch` 0."""

    ptr: torch.Tensor
    batch: int
    head: int
    row: int
    dim: int


class Scalars(NamedTuple):
    """A number per token, such as lse: (B, H, L), or (T, H) with `batch` 0."""

    ptr: torch.Tensor
    batch: int
    head: int
    row: int


class PartRows(NamedTuple):
    """Rows with a split of the keys before all else."""

    ptr: torch.Tensor
    split: int
    batch: int
    head: int
    row: int
    dim: int


class PartScalars(NamedTuple):
    """Scalars with a split of the keys before all else."""

    ptr: torch.Tensor
    split: int
    batch: int
    head: int
    row: int


class Pairs(NamedTuple):
    """Something per (b, h, i, j); stride 0 broadcasts."""

    ptr: torch.Tensor
    batch: int
    head: int
    row: int
    col: int


class Slopes(NamedTuple):
    """ALiBi's slopes per (b, h)."""

    ptr: torch.Tensor
    batch: int
    head: int


class Lengths(NamedTuple):
    """Dense: the two lengths. Packed: the longest, and the B+1 offsets of each."""

    q: int
    k: int
    offsets_q: torch.Tensor | None
    offsets_k: torch.Tensor | None


class Window(NamedTuple):
    """The ends of geometry.Band; None is open."""

    left: int | None
    right: int | None


class Dropout(NamedTuple):
    """Three 32-bit words as int32, and 1 / (1 - p)."""

    key0: int
    key1: int
    threshold: int
    factor: float


class Score(NamedTuple):
    """How a product q.k becomes a score in units of log2; of e where there is a bias, whose lowest
    values, as in many a mask, would be no float32 any more in units of log2.

    Without softcap: product * factor. With it: softcap * tanh(product * factor). Then ALiBi and
    bias.
    """

    factor: float
    softcap: float | None
    slopes: Slopes | None
    mask: Pairs | None
    bias: Pairs | None


def rows(t: torch.Tensor, packed: bool) -> Rows:
    """Of a canonical tensor with a row per token."""
    if packed:
        return Rows(t, 0, t.stride(1), t.stride(0), t.stride(2))
    return Rows(t, *t.stride())


def tiles(
    t: torch.Tensor, packed: bool, n: int, width: int | None = None
) -> TensorDescriptor | None:
    """Descriptor (TMA) of tiles of n rows and `width` columns (all, when None) as (B, H, L, D),
    packed ones as (1, H, T, D); None when the tensor's layout does not allow one.
    """
    if packed:
        t = t.transpose(0, 1)[None]
    item, strides = t.element_size(), t.stride()
    aligned = all(s > 0 and s * item % 16 == 0 for s in strides[:-1]) and t.data_ptr() % 16 == 0
    if not t.numel() or strides[-1] != 1 or not aligned:
        return None
    return TensorDescriptor(
        t, list(t.shape), list(strides), [1, 1, n, width or padded(t.shape[-1])]
    )


def scalars(t: torch.Tensor, packed: bool) -> Scalars:
    """Of a canonical tensor with a number per token."""
    if packed:
        return Scalars(t, 0, t.stride(1), t.stride(0))
    return Scalars(t, *t.stride())


def part_rows(t: torch.Tensor, packed: bool) -> PartRows:
    """Of a tensor of canonical ones, one per split."""
    return PartRows(t, t.stride(0), *rows(t[0], packed)[1:])


def part_scalars(t: torch.Tensor, packed: bool) -> PartScalars:
    """Of a tensor of canonical ones, one per split."""
    return PartScalars(t, t.stride(0), *scalars(t[0], packed)[1:])


def pairs(t: torch.Tensor | None, problem: Problem) -> Pairs | None:
    """Of a mask or bias in the shape it was given in: read in place, broadcast by stride."""
    if t is None:
        return None
    shape = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    seen = t.view(torch.uint8) if t.dtype == torch.bool else t
    return Pairs(seen, *seen.expand(shape).stride())


def sinks(x: Inputs) -> torch.Tensor | None:
    """One number after the other, as the kernels read them."""
    return None if x.sinks is None else x.sinks.contiguous()


def score(problem: Problem, x: Inputs) -> Score:
    """The scores of a problem."""
    unit = LOG2E if x.bias is None else 1.0
    softcap, factor = problem.spec.softcap, problem.scale * unit
    if softcap is not None and softcap < _SOFTCAP_RANGE[1]:
        softcap = max(softcap, _SOFTCAP_RANGE[0])
        factor, softcap = problem.scale / softcap, softcap * unit
    else:
        softcap = None
    slopes = None
    if x.alibi_slopes is not None:
        strides = x.alibi_slopes.expand(problem.batch, problem.heads_q).stride()
        slopes = Slopes(x.alibi_slopes, *strides)
    mask, bias = pairs(x.mask, problem), pairs(x.bias, problem)
    return Score(float32(factor), softcap, slopes, mask, bias)


def folds(s: Score) -> bool:
    """Whether a score is its product times a positive factor, so that the largest of a row can be
    found before they are multiplied.
    """
    plain = s.softcap is None and s.slopes is None and s.bias is None
    return plain and s.factor >= _LEAST_FOLDED_SCALE


def window(problem: Problem) -> Window:
    band = Band.of(problem.spec, problem.len_q, problem.len_k)
    return Window(band.left, band.right)


def dropout(problem: Problem) -> Dropout | None:
    p, seed = problem.spec.dropout_p, problem.spec.dropout_seed
    if not p or seed is None:
        return None
    threshold = math.floor(p * 2.0**32)
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    return Dropout(_signed(key0), _signed(key1), _signed(threshold), 1 / (1 - p))


def lengths(problem: Problem, device: torch.device) -> Lengths:
    if not problem.packed:
        return Lengths(problem.len_q, problem.len_k, None, None)
    stream = _stream(device)
    offsets = (
        _offsets(o or (), device, stream) for o in (problem.offsets_q, problem.offsets_k)
    )  # fmt: skip
    return Lengths(problem.len_q, problem.len_k, *offsets)


def ungrouped(problem: Problem, device: torch.device) -> tuple[Any, ...]:
    """The members of Window, Dropout (each None without one) and Lengths, for a kernel to take one
    by one and put together: those of a tuple, Triton specialises on being 1 or a multiple of 16,
    whatever the kernel says.
    """
    thrown = dropout(problem) or (None,) * len(Dropout._fields)
    return *window(problem), *thrown, *lengths(problem, device)


def float32(value: float) -> float:
    """The nearest finite float32, as Triton passes it."""
    largest = torch.finfo(torch.float32).max
    return min(max(value, -largest), largest)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_KEPT_ROWS = 1 << 14
"""Of a tensor that is kept for later calls, whose memory nobody accounts for: at most 128 KiB."""


@functools.lru_cache(maxsize=64)
def _kept_offsets(values: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """One upload for all launches of a problem and of those like it. A tensor is used on the stream
    that it was uploaded on alone, which orders both, and its end.
    """
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _offsets(values: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    find = _kept_offsets if len(values) <= _KEPT_ROWS else _kept_offsets.__wrapped__
    return find(values, device, stream)


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


@dataclass(frozen=True, slots=True)
class Grid:
    """Programs over the tiles of heads, and what tells a program which is its own."""

    programs: int
    arguments: tuple[Any, ...]


def query_grid(problem: Problem, tile: int, device: torch.device) -> Grid:
    """A program per `tile` queries of a query head."""
    return _grid(problem, tile, device, problem.heads_q, problem.group, of_keys=False)


def key_grid(problem: Problem, tile: int, device: torch.device) -> Grid:
    """A program per `tile` keys of a key head."""
    return _grid(problem, tile, device, problem.heads_kv, 1, of_keys=True)


def _grid(
    problem: Problem, tile: int, device: torch.device, heads: int, step: int, *, of_keys: bool
) -> Grid:
    length = problem.len_k if of_keys else problem.len_q
    tiles, rows, listed = -(-length // tile), problem.batch * heads, None
    programs = tiles * rows
    if problem.offsets_q is not None and problem.offsets_k is not None:
        own, other = problem.offsets_q, problem.offsets_k
        if of_keys:
            own, other = other, own
        few = tiles * len(own) <= _KEPT_ROWS
        find = _kept_tile_list if few else _kept_tile_list.__wrapped__
        listed = find(own, other, tile, problem.spec.causal, of_keys, device, _stream(device))
        programs = len(listed) * heads
    at_once = min(step * _heads_at_once(problem), max(1, rows))
    return Grid(programs, (listed, tiles, rows, heads, at_once))


@functools.lru_cache(maxsize=64)
def _kept_tile_list(
    own: tuple[int, ...],
    other: tuple[int, ...],
    tile: int,
    causal: bool,
    of_keys: bool,
    device: torch.device,
    stream: int,
) -> torch.Tensor:
    """The (sequence, tile) pairs of packed sequences, by their offsets, int32 (n, 2), longest work
    first. For its device and stream see _kept_offsets.
    """
    found = []
    sizes = zip(itertools.pairwise(own), itertools.pairwise(other), strict=True)
    for b, ((first, last), (other_first, other_last)) in enumerate(sizes):
        length, work = last - first, other_last - other_first
        for t in range(-(-length // tile)):
            seen = work
            if causal:  # late rows see many keys, early keys are seen by many rows
                seen = min(work, length - t * tile if of_keys else (t + 1) * tile)
            found.append((-seen, b, t))
    listed = [pair for _, *pair in sorted(found)]
    return torch.tensor(listed, dtype=torch.int32).view(-1, 2).to(device, non_blocking=True)


def _heads_at_once(problem: Problem) -> int:
    """How many key heads' programs to mix, so that tiles with most to do can go first and the keys
    and values in use still fit a GPU's cache together.
    """
    item = ITEM_SIZE[problem.dtype]
    return max(1, _CACHE_BYTES // max(1, problem.len_k * (problem.dim + problem.dim_v) * item))


def common(problem: Problem) -> dict[str, Any]:
    """Compile-time arguments that all kernels have in common."""
    return {
        "GROUP": problem.group,
        "BOTTOM_RIGHT": problem.spec.causal_align == "bottom_right",
        "PRECISION": precision(problem),
        "DIM": problem.dim,
        "DIM_V": problem.dim_v,
    }


def constants(problem: Problem) -> dict[str, Any]:
    """common, and what head dimensions are padded to where they are taken whole."""
    pads = {"DIM_PAD": padded(problem.dim), "DIM_V_PAD": padded(problem.dim_v)}
    return common(problem) | pads


def widths(problem: Problem, config: Config) -> dict[str, int]:
    """How many columns of the head dimensions a tile takes at a time."""
    whole = config.width or 256
    return {
        "WIDTH": min(whole, padded(problem.dim)),
        "WIDTH_V": min(whole, padded(problem.dim_v)),
    }


def in_vectors(t: torch.Tensor) -> bool:
    """Whether Triton can tell that rows lie where they can be loaded 16 bytes at a time."""
    return t.stride(-1) == 1 and all(stride % 16 == 0 for stride in t.stride()[:-1])


def padded(dim: int) -> int:
    """The power of two that a head dimension is padded to in registers."""
    return max(16, 1 << (dim - 1).bit_length())

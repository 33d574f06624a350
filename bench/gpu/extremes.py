"""Very many heads, and tensors so large that an offset into them takes more than 32 bits.

Only slices can be compared with the reference: rows whose results depend on few others, with a
gradient of 0 everywhere else. A dry run does the same on small tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

import torch

from flashwire_kernels.check import check
from flashwire_kernels.testing import Call
from flashwire_kernels.types import AttentionSpec
from gpu.items import PASS, SKIPPED, Item, Row
from gpu.place import Place
from gpu.results import Tensors, judged, results, same_bits

_ITEM = 2  # bytes of a bfloat16
_HERE = slice(-1, None)  # the last batch row, or head


def items(place: Place) -> list[Item]:
    """One after the other, since each may take a third of the memory."""
    limit = 2**11 if place.dry else 2**31
    programs = 4 if place.dry else 2**16
    run: dict[str, Callable[[Place], Row]] = {
        f"more than {limit} entries, by batch row": partial(_far_batch, limit),
        f"more than {limit} entries, by row": partial(_far_rows, limit),
        f"more than {limit} entries, packed": partial(_far_packed, limit),
        f"more than {limit} entries of mask, bias and dbias": partial(_far_pairs, limit),
        f"more than {limit} entries of a cache": partial(_far_cache, limit),
        f"more than {programs} heads": partial(_many_heads, programs, 1),
        f"more than {programs} heads, few queries": partial(_many_heads, programs, 30),
        f"more than {programs} heads, packed": partial(_many_packed, programs),
    }
    return [Item(name, function, alone=True) for name, function in run.items()]


def _far_batch(limit: int, place: Place) -> Row:
    heads, length, dim = (2, 40, 16) if place.dry else (32, 4096, 128)
    shape = (limit // (heads * length * dim) + 2, heads, length, dim)
    if why := _too_much(place, 8 * _size(shape)):
        return why
    call = _call(place, AttentionSpec(causal=True), dict.fromkeys("qkv", shape), shape)
    found = results(call)
    last = (_HERE, _HERE)
    return _compare(call, dict.fromkeys("qkv", last), last, found, dict.fromkeys(found, last))


def _far_rows(limit: int, place: Place) -> Row:
    """In the layout in which a row of all heads comes first."""
    heads, dim, width, rows = (2, 16, 30, 33) if place.dry else (16, 128, 127, 300)
    shape = (1, limit // (heads * dim) + 500, heads, dim)
    if why := _too_much(place, 8 * _size(shape)):
        return why
    spec = AttentionSpec(window=(width, 0), layout="blhd")
    call = _call(place, spec, dict.fromkeys("qkv", shape), shape)
    call.dout[:, :-rows] = 0
    found = results(call)
    queries, keys = slice(-rows, None), slice(-rows - width, None)
    of_q, of_k = (slice(None), queries, _HERE), (slice(None), keys, _HERE)
    parts = {"out": of_q, "lse": (slice(None), _HERE, queries), "dq": of_q, "dk": of_k, "dv": of_k}
    return _compare(call, {"q": of_q, "k": of_k, "v": of_k}, of_q, found, parts)


def _far_packed(limit: int, place: Place) -> Row:
    heads, dim, length = (2, 16, 40) if place.dry else (16, 128, 1500)
    sequences = limit // (heads * dim * length) + 2
    shape = (sequences * length, heads, dim)
    if why := _too_much(place, 8 * _size(shape)):
        return why
    lengths = [length] * sequences
    spec = AttentionSpec(causal=True)
    call = _call(place, spec, dict.fromkeys("qkv", shape), shape, lengths)
    found = results(call)
    last = (slice(-length, None), _HERE)
    return _compare(
        call, dict.fromkeys("qkv", last), last, found, dict.fromkeys(found, last), [length]
    )


def _far_pairs(limit: int, place: Place) -> Row:
    dim, rows = (16, 9) if place.dry else (64, 256)
    length = int(limit**0.5) + 70
    if why := _too_much(place, 4 * _size((length, length))):
        return why
    shape = (1, 1, length, dim)
    call = _call(place, AttentionSpec(), dict.fromkeys("qkv", shape), shape)
    call.tensors["bias"] = _random(place, (length, length))
    call.tensors["mask"] = torch.ones((length, length), dtype=torch.bool, device=place.device)
    call.tensors["mask"][:, ::3] = False
    call.dout[:, :, :-rows] = 0
    found = results(call)
    every, last = (slice(None),) * 4, (slice(None), slice(None), slice(-rows, None))
    parts = {"q": last, "k": every, "v": every, "bias": last[2:], "mask": last[2:]}
    mine = {"out": last, "lse": last, "dq": last, "dk": every, "dv": every, "dbias": last[2:]}
    return _compare(call, parts, last, found, mine)


def _far_cache(limit: int, place: Place) -> Row:
    heads, group, length, dim = (2, 2, 90, 16) if place.dry else (8, 8, 32768, 128)
    batch = limit // (heads * length * dim) + 2
    cache, queries = (batch, heads, length, dim), (batch, heads * group, 1, dim)
    if why := _too_much(place, 4 * _size(cache)):
        return why
    call = _call(place, AttentionSpec(), {"q": queries, "k": cache, "v": cache}, queries)
    found = results(call)
    of_q, of_k = (_HERE, slice(-group, None)), (_HERE, _HERE)
    parts = {"out": of_q, "lse": of_q, "dq": of_q, "dk": of_k, "dv": of_k}
    return _compare(call, {"q": of_q, "k": of_k, "v": of_k}, of_q, found, parts)


def _many_heads(programs: int, keys_per_query: int, place: Place) -> Row:
    """Each half of the batch must give the bits that it gives within the whole."""
    heads, queries, dim = (2, 3, 16) if place.dry else (16, 40, 32)
    shape = (programs // heads + 4, heads, queries, dim)
    if keys_per_query > 1:
        shape = (*shape[:2], queries if place.dry else 20, dim)
    cache = (*shape[:2], shape[2] * keys_per_query, dim)
    if why := _too_much(place, 8 * _size(cache)):
        return why
    call = _call(place, AttentionSpec(), {"q": shape, "k": cache, "v": cache}, shape)
    found = results(call)
    last = (_HERE,)
    row = _compare(call, dict.fromkeys("qkv", last), last, found, dict.fromkeys(found, last))
    middle = shape[0] // 2
    halves = {
        f"half {n}": (results(_part(call, half)), {name: t[half] for name, t in found.items()})
        for n, half in enumerate((slice(middle), slice(middle, None)))
    }
    return row if row["status"] != PASS else row | same_bits(halves)


def _many_packed(programs: int, place: Place) -> Row:
    heads, dim = (2, 16) if place.dry else (16, 32)
    lengths = [(3, 17, 33, 5)[n % 4] for n in range(programs // heads + 4)]
    shape = (sum(lengths), heads, dim)
    call = _call(place, AttentionSpec(causal=True), dict.fromkeys("qkv", shape), shape, lengths)
    found = results(call)
    last = (slice(-lengths[-1], None),)
    own = [lengths[-1]]
    return _compare(call, dict.fromkeys("qkv", last), last, found, dict.fromkeys(found, last), own)


Index = tuple[slice, ...]


def _compare(
    call: Call, given: Mapping[str, Index], dout: Index, found: Tensors, parts: Mapping[str, Index],
    lengths: list[int] | None = None,
) -> Row:  # fmt: skip
    """Slices of what was found against the reference of slices of what was given."""
    tensors = {name: call.tensors[name][index] for name, index in given.items()}
    mine = {name: found[name][index] for name, index in parts.items()}
    report = check(
        **tensors, **_offsets(lengths), spec=call.spec, dout=call.dout[dout], mine=mine
    )  # fmt: skip
    return judged(report.tensors)


def _call(
    place: Place, spec: AttentionSpec, shapes: dict[str, tuple[int, ...]], dout: tuple[int, ...],
    lengths: list[int] | None = None,
) -> Call:  # fmt: skip
    tensors = {name: _random(place, shape) for name, shape in shapes.items()}
    return Call(
        spec=spec, tensors=tensors | _offsets(lengths), dout=_random(place, dout), dlse=None
    )


def _part(call: Call, rows: slice) -> Call:
    tensors = {name: t[rows] for name, t in call.tensors.items()}
    return Call(spec=call.spec, tensors=tensors, dout=call.dout[rows], dlse=None)


def _offsets(lengths: list[int] | None) -> Tensors:
    if lengths is None:
        return {}
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}


def _random(place: Place, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=place.device)


def _size(shape: tuple[int, ...]) -> int:
    elements = 1
    for n in shape:
        elements *= n
    return elements * _ITEM


def _too_much(place: Place, needed: int) -> Row | None:
    """Why not, where there is no memory for it."""
    free = place.free_bytes()
    if needed * 1.2 < free:
        return None
    return {
        "status": SKIPPED,
        "why": f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free",
    }

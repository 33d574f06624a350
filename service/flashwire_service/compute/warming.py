"""Compiling, or loading from Triton's cache, what first requests would have to wait for.

Triton compiles a kernel anew for every dtype, option and constant; and for an integer that it looks
at, such as a length or a stride, once where that is 1, once where 16 divides it, and once for all
others. So an entry of the list is computed with lengths and heads of every such kind. What has been
compiled costs nothing again. An entry covers requests of its dtype, head dimensions, query heads
per key head and options, dense or packed,

- of any batch, numbers of heads and layout, forward, and backward without dlse;
- of any lengths; but where 2 to 64 rows (queries times query heads per key head) share out many
  keys between programs, only those of one query;
- where 16 divides the head dimensions, and no tensor has 2**31 elements;
- with other options as they are by default, sinks in q's dtype, and slopes (Hq,) in float32.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from flashwire_kernels import api
from flashwire_kernels.fused.config import COUNT_FROM
from flashwire_kernels.tensors import Wanted
from flashwire_kernels.types import AttentionSpec
from flashwire_service import warmup
from flashwire_service.compute import device as devices
from flashwire_service.compute.failures import is_fatal
from flashwire_service.logs import Log
from flashwire_service.warmup import Entry

_ALIGNED = 16  # what Triton asks integers to be a multiple of
_FEW = (1, 3, 8, 16)  # 1; aligned never, with an even number of heads, always
_WINDOW = 3
_SEED = 0x9E3779B97F4A7C15


class Shape(NamedTuple):
    """A request: `batch` rows or packed sequences, all alike."""

    batch: int
    heads_kv: int
    len_q: int
    len_k: int
    backward: bool


def run(text: str, device: torch.device, log: Log, step: Callable[[], object]) -> None:
    """Compute every entry of a list that warmup.parse understands; `step` is called before each
    request of it. An entry that fails is logged and left. Raises what leaves the device unusable.
    """
    entries = warmup.parse(text)
    if device.type == "cpu":
        log.debug("nothing to warm up", device=str(device))
        return
    for number, entry in enumerate(entries, start=1):
        started = time.monotonic()
        progress = {"entry": str(entry), "number": number, "of": len(entries)}
        log.info("warming up", **progress)
        try:
            compute(entry, device, step)
        except Exception as e:
            if is_fatal(e) or not devices.answers(device):
                raise
            log.warning("warm-up failed", **progress, reason=f"{type(e).__name__}: {e}")
        else:
            log.info("warmed up", **progress, seconds=round(time.monotonic() - started, 3))
        devices.release_cached(device)


def compute(entry: Entry, device: torch.device, step: Callable[[], object]) -> None:
    """Every kind of request that an entry covers, once."""
    for shape in shapes(entry):
        step()
        request(entry, shape, device)
        devices.synchronize(device)


def shapes(entry: Entry) -> Iterator[Shape]:
    """What differs in the eyes of Triton, or runs other kernels."""
    heads = sorted({1, 2, _ALIGNED // math.gcd(_ALIGNED, entry.group), _ALIGNED})
    batches = (1, 2) if entry.alibi else (1,)  # more than one row may share slopes
    for batch, heads_kv, len_q, len_k in itertools.product(batches, heads, _FEW, _FEW):
        yield Shape(batch, heads_kv, len_q, len_k, backward=True)
    counted = -(-COUNT_FROM // entry.group // _ALIGNED) * _ALIGNED
    many = (counted, counted + 1, counted + 8)
    for heads_kv, len_q, len_k in itertools.product(heads, many, _FEW):
        yield Shape(1, heads_kv, len_q, len_k, backward=False)
    for heads_kv, len_k in itertools.product(heads, (2048, 2049)):
        # Splits of a batch row's keys lie batch * heads numbers apart.
        for batch in (1,) if heads_kv * entry.group % _ALIGNED == 0 else (1, 3, _ALIGNED):
            yield Shape(batch, heads_kv, 1, len_k, backward=False)


def request(entry: Entry, shape: Shape, device: torch.device) -> None:
    """Compute one, as a job would: tensors of zeros, contiguous on the device."""
    batch, heads_kv, len_q, len_k, backward = shape
    dtype = getattr(torch, entry.dtype)

    def rows(heads: int, length: int, dim: int) -> torch.Tensor:
        if entry.packed:
            return torch.zeros(batch * length, heads, dim, dtype=dtype, device=device)
        return torch.zeros(batch, heads, length, dim, dtype=dtype, device=device)

    heads = heads_kv * entry.group
    spec = AttentionSpec(
        causal=entry.causal,
        window=(_WINDOW, _WINDOW) if entry.window else None,
        softcap=30.0 if entry.softcap else None,
        dropout_p=0.1 if entry.dropout else 0.0,
        dropout_seed=_SEED if entry.dropout else None,
    )
    tensors: dict[str, Any] = {
        "q": rows(heads, len_q, entry.dim),
        "k": rows(heads_kv, len_k, entry.dim),
        "v": rows(heads_kv, len_k, entry.dim_v),
    }
    if entry.alibi:
        tensors["alibi_slopes"] = torch.zeros(heads, device=device)
    if entry.sinks:
        tensors["sinks"] = torch.zeros(heads, dtype=dtype, device=device)
    if entry.packed:
        for name, length in (("cu_seqlens_q", len_q), ("cu_seqlens_k", len_k)):
            tensors[name] = torch.arange(0, (batch + 1) * length, length, device=device)
    forward = api.forward(**tensors, spec=spec, backend="triton")
    if backward:
        api.backward(
            rows(heads, len_q, entry.dim_v),
            **tensors, out=forward.out, lse=forward.lse, spec=spec, backend="triton",
            wanted=Wanted(sinks=entry.sinks),
        )  # fmt: skip

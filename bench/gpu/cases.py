"""The cases of the conformance part; `small` ones are for the interpreter."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from flashwire_kernels.testing import Case, pairwise

_DTYPES = ("bfloat16", "float16", "float32")
_DIMS = [(16, None), (59, 24), (64, None), (128, None), (192, 128), (256, None)]
_PACKED = {"lens_q": (70, 0, 1, 130, 5), "lens_k": (90, 4, 0, 130, 200), "padding": 7}
_DECODE = {"lens_q": (2, 0, 1, 5), "lens_k": (1300, 70, 0, 3), "padding": 2}
_GRID: dict[str, list[Any]] = {
    "form": [
        {"len_q": 150, "len_k": 170},
        {"len_q": 3, "len_k": 700},
        {"len_q": 203, "len_k": 113, "layout": "blhd"},
        {"len_q": 129, "len_k": 257, "rank": 3, "batch": 1},
        _PACKED,
        _DECODE,
    ],
    "heads": [(2, 2), (6, 2), (6, 1)],
    "dims": _DIMS,
    "dtype": list(_DTYPES),
    "causal": [False, True],
    "causal_align": ["bottom_right", "top_left"],
    "window": [None, (60, 0), (None, 3), (20, None), (40, 90)],
    "softcap": [None, 2.0],
    "scale": [None, -0.4],
    "dropout": [0.0, 0.3],
    "alibi": [None, "h", "bh"],
    "sinks": [False, True],
    "mask": [None, "b1qk", "k", "1hq1"],
    "bias": [None, "1hqk", "b11k", "q1"],
    "dlse": [True, False],
    "poison": [True, False],
}
_EVERYTHING = Case(
    heads_q=6, heads_kv=2, dim=24, dim_v=40, len_q=150, len_k=170, causal=True, window=(60, 0),
    softcap=2.5, alibi="bh", sinks=True, mask="b1qk", bias="1hqk", dropout=0.2, poison=True,
)  # fmt: skip


def grid(small: bool) -> list[Case]:
    """Lengths of many tiles, every pair of options, and everything at once, in every dtype."""
    plain = [
        Case(heads_q=4, heads_kv=2, len_q=515, len_k=640, dim=dim, dtype=dtype, causal=causal)
        for dim, dtype, causal in itertools.product((64, 128, 256), _DTYPES, (False, True))
    ]
    plain += [dataclasses.replace(c, len_q=640, len_k=515) for c in plain if c.dtype == _DTYPES[0]]
    masked = {"causal": True, "window": (2000, 0), "sinks": True}
    decode = [
        Case(batch=3, heads_q=16, heads_kv=2, len_q=1, len_k=4100, dim=dim, dtype=dtype, **options)
        for dim, dtype, options in [
            *((dim, "bfloat16", {}) for dim in (64, 128, 256)),
            *((128, dtype, masked) for dtype in _DTYPES),
            (80, "float16", masked),
        ]
    ]
    pairs = [
        Case(
            **form,
            heads_q=heads[0],
            heads_kv=heads[1],
            dim=dims[0],
            dim_v=dims[1],
            seed=seed,
            **options,
        )
        for seed, (form, heads, dims, options) in enumerate(map(_apart, pairwise(_GRID)))
    ]
    whole = [
        dataclasses.replace(_EVERYTHING, dtype=dtype, **form)
        for dtype, form in itertools.product(_DTYPES, ({}, _PACKED))
    ]
    if not small:
        return pairs + whole + plain + decode
    return [_shrunk(case) for case in pairs[::8] + whole[1:2] + plain[::13] + decode[3:4]]


def references(small: bool) -> list[Case]:
    """To compare the float64 reference with itself."""
    plain = Case(causal=True, len_q=300, len_k=280, dim=64, bias="1hqk")
    return [_shrunk(plain) if small else plain]


def singles(small: bool) -> list[Case]:
    """float32, where TF32 must not run unasked."""
    plain = Case(len_q=300, len_k=280, dtype="float32", causal=True)
    decode = dataclasses.replace(plain, len_q=1, len_k=3000, heads_q=8)
    if small:
        return [_shrunk(dataclasses.replace(plain, batch=1))]
    return [dataclasses.replace(c, dim=d) for c in (plain, decode) for d in (64, 128, 256)]


def described(small: bool) -> list[Case]:
    """Whole tiles of layouts that tensor descriptors can bring."""
    plain = Case(heads_q=4, heads_kv=2, len_q=520, len_k=648, dim=64, dtype="bfloat16")
    found = [
        plain,
        dataclasses.replace(plain, causal=True, dim=128),
        dataclasses.replace(plain, layout="blhd", dim=256, dim_v=64),
        dataclasses.replace(plain, **_PACKED, dim=128),
        dataclasses.replace(plain, dim=80, dtype="float16"),
    ]
    return [_shrunk(found[0])] if small else found


def repeated(small: bool) -> list[Case]:
    """For repetition, and for other places in memory."""
    plain = Case(batch=8, heads_q=8, heads_kv=2, len_q=1024, len_k=1024, dim=128,
                 dtype="bfloat16", causal=True)  # fmt: skip
    found = [
        plain,
        dataclasses.replace(_EVERYTHING, dtype="float16", batch=6),
        dataclasses.replace(plain, dim=64, dtype="float32", batch=2),
        dataclasses.replace(plain, **_PACKED, sinks=True, bias="1hqk"),
    ]
    if small:
        return [_shrunk(dataclasses.replace(found[-1], dim=16))]
    return found


def neighbours(small: bool) -> list[Case]:
    """Dense, with nothing that is summed over the batch."""
    plain = Case(batch=33, heads_q=8, heads_kv=2, len_q=300, len_k=333, dim=64, dtype="bfloat16")
    found = [
        plain,
        dataclasses.replace(plain, causal=True, dropout=0.2, window=(100, 0)),
        dataclasses.replace(plain, len_q=2, len_k=3000),
    ]
    return [_shrunk(found[1])] if small else found


def spoiled(small: bool) -> list[Case]:
    """Long enough for keys to be searched for NaN and Inf ahead of the forward."""
    plain = Case(batch=1, heads_q=8, heads_kv=2, len_q=1100, len_k=700, dim=64, dtype="bfloat16")
    return [_shrunk(plain)] if small else [plain, dataclasses.replace(plain, causal=True)]


def _apart(row: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    return row.pop("form"), row.pop("heads"), row.pop("dims"), row


def _shrunk(case: Case) -> Case:
    """The case with few rows, keys and heads: two tiles of each."""
    few: dict[str, Any] = {"batch": min(case.batch, 2), "len_q": min(case.len_q, 70)}
    few |= {"heads_q": min(2, case.heads_q // case.heads_kv), "heads_kv": 1}
    if case.lens_q is not None and case.lens_k is not None:
        few |= {"lens_q": (70, 0, 1), "lens_k": (70, 4, 0)}
    return dataclasses.replace(case, len_k=min(case.len_k, 80), **few)

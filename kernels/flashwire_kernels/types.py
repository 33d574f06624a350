"""The options of one attention, and the header of a tensor. No torch here: front ends read it too.

The meaning of every option is DESIGN.md, "The operation".
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from flashwire_kernels.errors import InvalidAttention, Violation

CausalAlign = Literal["bottom_right", "top_left"]
Layout = Literal["bhld", "blhd"]
Precision = Literal["ieee", "tf32"]
MAX_SIZE = 2**31 - 1  # of a dimension
MAX_ELEMENTS = 2**48  # of a tensor; a size of 0 counts as 1, since strides do not know it
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
OFFSET_DTYPES = ("int32", "int64")
ITEM_SIZE = {
    "bool": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Everything about a tensor but its values. `dtype` is a key of ITEM_SIZE."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The options of one attention, validated and normalised when made.

    scale         factor on q.k; None means head_dim**-0.5; any finite value
    causal        key j is visible to query i only when j <= pos(i)
    causal_align  pos(i) = i + (Lk - Lq) for "bottom_right", i for "top_left";
                  moves window and ALiBi too, with or without causal
    window        (left, right), inclusive, in keys around pos(i); None or -1 is an open end
    softcap       s becomes softcap * tanh(s / softcap); None or 0 is off
    dropout_p     probability in [0, 1) that an entry of p is dropped
    dropout_seed  uint64; needed once dropout_p > 0
    layout        "bhld" (the meaning of None) or "blhd"; must be None for packed tensors
    precision     "ieee" or "tf32": permission for float32 products of reduced precision

    Raises InvalidAttention naming every field that is wrong.
    """

    scale: float | None = None
    causal: bool = False
    causal_align: CausalAlign = "bottom_right"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    layout: Layout | None = None
    precision: Precision = "ieee"

    def __post_init__(self) -> None:
        wrong = [
            *_real("scale", self.scale),
            *_flag("causal", self.causal),
            *_choice("causal_align", self.causal_align, get_args(CausalAlign)),
            *_window(self.window),
            *_real("softcap", self.softcap, minimum=0.0),
            *_dropout(self.dropout_p, self.dropout_seed),
            *_choice("layout", self.layout, (None, *get_args(Layout))),
            *_choice("precision", self.precision, get_args(Precision)),
        ]
        if wrong:
            raise InvalidAttention(wrong)
        self._normalise()

    def _normalise(self) -> None:
        """Equal meanings become equal values: -1 is an open end, a fully open window is none."""
        if self.scale is not None:
            object.__setattr__(self, "scale", float(self.scale) + 0.0)  # -0.0 is 0.0
        if self.window is not None:
            left, right = (None if end == -1 else end for end in self.window)
            open_both = left is None and right is None
            object.__setattr__(self, "window", None if open_both else (left, right))
        object.__setattr__(self, "softcap", float(self.softcap) if self.softcap else None)
        object.__setattr__(self, "dropout_p", float(self.dropout_p))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond float64
        return False


def _show(value: object) -> str:
    """A value for a message, cut short; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def _real(name: str, value: object, minimum: float | None = None) -> list[Violation]:
    if value is None:
        return []
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return [Violation(name, f"must be a number, got {type(value).__name__}")]
    if not _finite(value):
        return [Violation(name, f"must be finite, got {_show(value)}")]
    if minimum is not None and value < minimum:
        return [Violation(name, f"must be at least {minimum:g}, got {_show(value)}")]
    return []


def _flag(name: str, value: object) -> list[Violation]:
    if isinstance(value, bool):
        return []
    return [Violation(name, f"must be true or false, got {type(value).__name__}")]


def _choice(name: str, value: object, allowed: Sequence[object]) -> list[Violation]:
    if (value is None or isinstance(value, str)) and value in allowed:
        return []
    names = ", ".join(repr(a) for a in allowed if a is not None)
    return [Violation(name, f"must be one of {names}, got {_show(value)}")]


def _window(value: object) -> list[Violation]:
    if value is None:
        return []
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return [Violation("window", "must be a pair [left, right]")]
    wrong = []
    for end, name in zip(value, ("left", "right"), strict=True):
        if end is not None and not _is_integer(end):
            wrong.append(
                Violation("window", f"{name} must be an integer or null, got {_show(end)}")
            )
        elif end is not None and end < -1:
            wrong.append(
                Violation("window", f"{name} must be at least -1 (open), got {_show(end)}")
            )
    return wrong


def _dropout(p: object, seed: object) -> list[Violation]:
    wrong = []
    if not _is_number(p):
        wrong.append(Violation("dropout", f"p must be a number, got {type(p).__name__}"))
    elif not 0 <= p < 1:  # type: ignore[operator]  # false for NaN as well
        wrong.append(Violation("dropout", f"p must be in [0, 1), got {_show(p)}"))
    elif p and seed is None:
        wrong.append(Violation("dropout", "a seed is needed"))
    if seed is not None and (not _is_integer(seed) or not 0 <= seed < 2**64):  # type: ignore[operator]
        wrong.append(
            Violation("dropout", f"seed must be an integer in [0, 2**64), got {_show(seed)}")
        )
    return wrong

"""What a worker compiles before it is ready: the syntax of the list. No torch here.

    bfloat16:d128:causal:gqa4, float16:d64x32:window

An entry is a dtype and, in any order, words of what requests will ask for:

    dN, dNxM  head dimension of q and k, and of v where it differs; needed
    gqaN      N query heads share a key head; else 1
    causal    also: window, softcap, alibi, dropout, sinks, packed
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass

from flashwire_kernels.fused.support import MAX_DIM

DTYPES = ("bfloat16", "float16", "float32")
MAX_GROUP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kind of request. `dim` is the head dimension of q and k, `dim_v` that of v."""

    dtype: str
    dim: int
    dim_v: int
    group: int = 1
    causal: bool = False
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    sinks: bool = False
    packed: bool = False

    def __str__(self) -> str:
        dims = f"d{self.dim}" if self.dim == self.dim_v else f"d{self.dim}x{self.dim_v}"
        group = [f"gqa{self.group}"] if self.group > 1 else []
        return ":".join([self.dtype, dims, *group, *(o for o in _OPTIONS if getattr(self, o))])


_OPTIONS = tuple(field.name for field in dataclasses.fields(Entry) if field.type == "bool")
_NUMBERS = re.compile(r"(?:d([0-9]{1,4})(?:x([0-9]{1,4}))?|gqa([0-9]{1,4}))")


def parse(text: str) -> tuple[Entry, ...]:
    """The entries of a list, each once. Raises ValueError with every mistake."""
    entries: dict[Entry, None] = {}
    mistakes = []
    for item in filter(None, map(str.strip, text.split(","))):
        try:
            entries[_entry(item)] = None
        except ValueError as e:
            mistakes.append(f"{item!r}: {e}")
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return tuple(entries)


def normalised(text: str) -> str:
    """A list in its canonical form. Raises what `parse` raises."""
    return ", ".join(map(str, parse(text)))


def _entry(text: str) -> Entry:
    dtype, *words = (word.strip() for word in text.split(":"))
    given: dict[str, int | bool] = {}
    wrong = []
    if dtype not in DTYPES:
        wrong.append(f"must begin with one of {', '.join(DTYPES)}, not {dtype!r}")
    for word in words:
        try:
            found = _word(word)
        except ValueError as e:
            wrong.append(str(e))
            continue
        if given.keys() & found.keys():
            wrong.append(f"{word!r} repeats what stands before it")
        given |= found
    if not any(re.match("d[0-9]", word) for word in words):
        wrong.append("needs a head dimension, such as d128")
    if wrong:
        raise ValueError(", ".join(wrong))
    return Entry(dtype=dtype, **given)  # type: ignore[arg-type]


def _word(word: str) -> dict[str, int | bool]:
    """What a word says, by the fields of Entry."""
    if word in _OPTIONS:
        return {word: True}
    match = _NUMBERS.fullmatch(word)
    if match is None:
        (near,) = difflib.get_close_matches(word, ("dN", "gqaN", *_OPTIONS), n=1, cutoff=0.0)
        raise ValueError(f"there is no {word!r}; nearest is {near!r}")
    if match[3] is not None:
        return {"group": _bounded(word, match[3], MAX_GROUP)}
    dim = _bounded(word, match[1], MAX_DIM)
    return {"dim": dim, "dim_v": dim if match[2] is None else _bounded(word, match[2], MAX_DIM)}


def _bounded(word: str, digits: str, most: int) -> int:
    if not 1 <= int(digits) <= most:
        raise ValueError(f"{word!r} must have numbers from 1 to {most}")
    return int(digits)

"""What a message is made of: element types, names and their order, limits, and what can be wrong.

docs/wire.md is the same in words, with an annotated example.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

VERSION = 1
MEDIA_TYPE = "application/msgpack"
ALIGNMENT = 64  # of payloads, relative to the start of the message
PIECE = 2**30  # a payload above MAX_BIN bytes travels as bins of this size, the last one shorter
MAX_BIN = 2**32 - 1

ITEM_SIZE: Mapping[str, int] = {
    "bool": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}

OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
TENSOR_ORDER = (
    "q", "k", "v", "out", "lse", "dout", "dlse", "mask", "bias", "alibi_slopes", "sinks", *OFFSETS,
    "dq", "dk", "dv", "dbias", "dsinks",
)  # fmt: skip
_SPEC = ("scale", "causal", "causal_align", "window", "softcap", "dropout", "layout", "precision")
OPTION_ORDER = (
    "version", "residual", "release", *_SPEC, "backend", "return_lse", "save_for_backward",
    "bias_grad", "sinks_grad", "backends", "sram_elements",
)  # fmt: skip
GROUP_ORDER = ("request", "mine")  # maps of a check, between its options and its tensors


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about a tensor but its values. `dtype` is a key of ITEM_SIZE."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor inside a message: its header, and (offset, length) of each piece of its payload.

    Offsets count from the start of the message. An empty payload has no pieces.
    """

    dtype: str
    shape: tuple[int, ...]
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def header(self) -> Header:
        return Header(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.segments)


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message. Maps inside it, such as the `request` of a check, are options in options;
    their tensors have dotted names: "request.q"."""

    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorRef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a decoder accepts. Nothing is ever allocated from a claim, whatever these say.

    max_message   bytes of a whole message, None for no limit
    max_header    bytes of everything but payloads
    max_depth     levels of maps and lists
    max_keys      entries of one map
    max_rank      dimensions of a tensor
    max_elements  of a tensor that comes with its data, None for no limit but its bytes
    """

    max_message: int | None = None
    max_header: int = 64 * 1024
    max_depth: int = 8
    max_keys: int = 64
    max_rank: int = 8
    max_elements: int | None = None


class WireError(ValueError):
    """A message is not what the wire says.

    code     "malformed" (400: bytes that are not what they claim), "invalid" (422: well-formed and
             meaningless) or "too_large" (413)
    field    dotted name of the option or tensor, None when it is the message as a whole
    detail   what is wrong, with the value and the limit
    """

    def __init__(
        self,
        detail: str,
        field: str | None = None,
        code: Literal["malformed", "invalid", "too_large"] = "malformed",
    ) -> None:
        self.code = code
        self.field = None if field is None else field[:200]
        self.detail = detail
        super().__init__(f"{self.field}: {detail}" if self.field else detail)


@dataclass(frozen=True)
class Schema:
    """Which names stand where in a message.

    tensors   dotted names of the places that hold tensors. "request.q" makes "request" a map of its
              own, with options and tensors inside
    options   dotted names of every other known key; None takes any (a client reading a reply)
    payload   False where tensors are described without their data (a plan)
    """

    tensors: frozenset[str]
    options: frozenset[str] | None = None
    payload: bool = True

    @cached_property
    def groups(self) -> frozenset[str]:
        """Names of the maps that hold tensors."""
        return frozenset(name.rpartition(".")[0] for name in self.tensors if "." in name)

    def siblings(self, prefix: str) -> list[str]:
        """Every known name directly under a prefix ("" or "request."), without it."""
        known = self.tensors | self.groups | (self.options or frozenset())
        under = (name.removeprefix(prefix) for name in known if name.startswith(prefix))
        return sorted(name for name in under if "." not in name)


# Names of torch and flash-attn: what to say of them where these names of ours are known.
_FOREIGN: Mapping[str, tuple[str, ...]] = {
    "softmax_scale": ("did you mean 'scale'?", "scale"),
    "sm_scale": ("did you mean 'scale'?", "scale"),
    "is_causal": ("did you mean 'causal'?", "causal"),
    "attn_mask": ("did you mean 'mask' (boolean) or 'bias' (added)?", "mask", "bias"),
    "attn_bias": ("did you mean 'bias'?", "bias"),
    "dropout_p": ("did you mean 'dropout'?", "dropout"),
    "window_size": ("did you mean 'window'?", "window"),
    "cu_seqlens": ("give both 'cu_seqlens_q' and 'cu_seqlens_k'", "cu_seqlens_q", "cu_seqlens_k"),
    "enable_gqa": ("GQA needs no option: the heads of k and v say it", "causal"),
    "max_seqlen_q": ("not needed: cu_seqlens_q says it", "cu_seqlens_q"),
    "max_seqlen_k": ("not needed: cu_seqlens_k says it", "cu_seqlens_k"),
    "deterministic": ("not needed: the same request gives the same bits", "causal"),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a wrong name: "; did you mean 'causal'?", or every name when none is near."""
    names = list(known)
    hint, *ours = _FOREIGN.get(name, ("",))
    if hint and all(other in names for other in ours):
        return f"; {hint}"
    close = difflib.get_close_matches(name[:64], names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def _under(group: str, names: Iterable[str]) -> frozenset[str]:
    return frozenset(f"{group}.{name}" for name in names)


_SHAPING = frozenset(("mask", "bias", "alibi_slopes", "sinks", *OFFSETS))
_FORWARD_TENSORS = frozenset("qkv") | _SHAPING
_FORWARD_OPTIONS = frozenset((*_SPEC, "backend", "return_lse", "save_for_backward"))

ATTENTION = Schema(_FORWARD_TENSORS, _FORWARD_OPTIONS | {"version"})
BACKWARD = Schema(
    _FORWARD_TENSORS | {"out", "lse", "dout", "dlse"},
    frozenset(("version", "residual", "release", *_SPEC, "backend", "bias_grad", "sinks_grad")),
)
CHECK = Schema(
    _under("request", _FORWARD_TENSORS)
    | _under("mine", ("out", "lse", "dq", "dk", "dv"))
    | {"dout"},
    _under("request", _FORWARD_OPTIONS | {"version"}) | {"version", "backends"},
)
PLAN = Schema(_FORWARD_TENSORS, _FORWARD_OPTIONS | {"version", "sram_elements"}, payload=False)
REPLY = Schema(frozenset(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")))

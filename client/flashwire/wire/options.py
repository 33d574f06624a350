"""Option values in canonical form: one spelling for each meaning, defaults left out.

Only spelling is settled here. Whether a value makes sense is the server's to say: what has no
canonical form is sent as it is, as long as msgpack can carry it.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashwire.wire.schema import WireError


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a request, as they go into a message. None always means "not given".

    Raises WireError (invalid) for a name that is no option and for a value no message can carry.
    """
    result = {}
    for name, value in options.items():
        if name not in _FORMS:
            raise WireError("is not an option", name, "invalid")
        form, default = _FORMS[name]
        value = form(name, value)
        if value is None or (value == default and type(value) is type(default)):
            continue
        result[name] = value
    return result


def _plain(name: str, value: Any) -> Any:
    """A value as msgpack can carry it."""
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or torch
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        value = int(value)
        if -(2**63) <= value < 2**64:
            return value
        raise WireError(f"{str(value)[:64]} does not fit in 64 bits", name, "invalid")
    if isinstance(value, numbers.Real):
        return float(value)
    raise WireError(f"cannot be a {type(value).__name__}", name, "invalid")


def _real(name: str, value: Any) -> Any:
    value = _plain(name, value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _softcap(name: str, value: Any) -> Any:
    value = _real(name, value)
    return None if isinstance(value, float) and value == 0 else value


def _window(name: str, value: Any) -> Any:
    """[left, right], None for an open end; nothing when both are open."""
    if value is None:
        return None
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise WireError("must be a pair (left, right)", name, "invalid")
    if len(value) != 2:
        raise WireError(f"must be a pair (left, right), got {len(value)}", name, "invalid")
    ends = [_plain(name, end) for end in value]
    ends = [None if type(end) is int and end == -1 else end for end in ends]
    return None if ends == [None, None] else ends


def _dropout(name: str, value: Any) -> Any:
    """{"p", "seed"}; nothing when p is 0 and no seed is given."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value.keys() <= {"p", "seed"}:
        raise WireError("must be a map of p and seed", name, "invalid")
    p = _real(name, value.get("p"))
    seed = _plain(f"{name}.seed", value.get("seed"))
    if seed is None:
        return None if p is None or p == 0 else {"p": p}
    return {"p": p, "seed": seed}


def _words(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise WireError("must be a list", name, "invalid")
    return [_plain(name, item) for item in value]


_FORMS: Mapping[str, tuple[Callable[[str, Any], Any], Any]] = {
    "version": (_plain, 1),
    "residual": (_plain, None),
    "release": (_plain, False),
    "scale": (_real, None),
    "causal": (_plain, False),
    "causal_align": (_plain, "bottom_right"),
    "window": (_window, None),
    "softcap": (_softcap, None),
    "dropout": (_dropout, None),
    "layout": (_plain, "bhld"),
    "precision": (_plain, "ieee"),
    "backend": (_plain, "auto"),
    "return_lse": (_plain, False),
    "save_for_backward": (_plain, False),
    "bias_grad": (_plain, False),
    "sinks_grad": (_plain, False),
    "backends": (_words, None),
    "sram_elements": (_plain, None),
}

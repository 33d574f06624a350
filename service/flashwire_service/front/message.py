"""A request as the front end holds it: options, tensor headers, and the bytes they point into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashwire.wire import TensorRef
from flashwire_kernels.types import TensorHeader
from flashwire_service.front.buffers import Buffers
from flashwire_service.ipc.memory import Memory

_JSON_NAMES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer",
    float: "a number", bytes: "bytes", type(None): "null",
}  # fmt: skip
_QUOTE = 60


@dataclass(slots=True)
class Message:
    """`tensors` are named by their place, dotted when nested; `body` holds `size` bytes.

    buffers   where its memory may go to be used again, once it is `finished`: nobody reads it then
    """

    options: dict[str, Any]
    tensors: dict[str, TensorRef]
    body: bytes | Memory
    size: int
    buffers: Buffers | None = None
    finished: bool = False

    def headers(self, prefix: str = "") -> dict[str, TensorHeader]:
        """Headers of the tensors right under a dotted prefix, by their name under it."""
        return {
            name.removeprefix(prefix): TensorHeader(ref.dtype, ref.shape)
            for name, ref in self.tensors.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }

    def close(self) -> None:
        """Give up the memory, if there is any."""
        if not isinstance(self.body, Memory):
            return
        if self.buffers is not None and self.finished:
            self.buffers.give_back(self.body)
        else:
            self.body.close()


def quoted(value: object) -> str:
    """A value of a request, short enough to be repeated in a reply; what it is, when composite."""
    if isinstance(value, (dict, list, bytes)):
        return type_name(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str):
        return repr(value) if len(value) <= _QUOTE else repr(value[:_QUOTE]) + "..."
    text = str(value)
    return text if len(text) <= _QUOTE else text[:_QUOTE] + "..."


def type_name(value: object) -> str:
    """What a value is, in the words of JSON."""
    return _JSON_NAMES.get(type(value), type(value).__name__)

"""The bytes of a message: the one place that knows them, for the client and for the service.

    wire.lay_out(options, headers)        where every byte goes, before payloads are at hand
    wire.Decoder(wire.ATTENTION, limits)  reads a message as it arrives, payloads untouched

docs/wire.md is the format in words.
"""

from flashwire.wire.decode import Decoder, check_version, decode
from flashwire.wire.encode import Buffer, Layout, encode, lay_out
from flashwire.wire.options import canonical
from flashwire.wire.recall import Recall
from flashwire.wire.schema import (
    ALIGNMENT,
    ATTENTION,
    BACKWARD,
    CHECK,
    ITEM_SIZE,
    MEDIA_TYPE,
    OFFSETS,
    OPTION_ORDER,
    PIECE,
    PLAN,
    REPLY,
    TENSOR_ORDER,
    VERSION,
    Header,
    Limits,
    Message,
    Schema,
    TensorRef,
    WireError,
    nearest,
)

__all__ = [
    "ALIGNMENT",
    "ATTENTION",
    "BACKWARD",
    "CHECK",
    "ITEM_SIZE",
    "MEDIA_TYPE",
    "OFFSETS",
    "OPTION_ORDER",
    "PIECE",
    "PLAN",
    "REPLY",
    "TENSOR_ORDER",
    "VERSION",
    "Buffer",
    "Decoder",
    "Header",
    "Layout",
    "Limits",
    "Message",
    "Recall",
    "Schema",
    "TensorRef",
    "WireError",
    "canonical",
    "check_version",
    "decode",
    "encode",
    "lay_out",
    "nearest",
]

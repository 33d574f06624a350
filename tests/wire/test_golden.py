"""Exact bytes of messages. A change here is a change of the wire, and needs a new version.

`python tests/wire/test_golden.py` writes the files anew.
"""

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from flashwire import wire

GOLDEN = Path(__file__).parent / "golden"
Tensors = dict[str, tuple[wire.Header, memoryview]]


def tensor(dtype: str, shape: tuple[int, ...], start: int = 0) -> tuple[wire.Header, memoryview]:
    """A tensor whose bytes count up from `start`."""
    header = wire.Header(dtype, shape)
    return header, memoryview(bytes((start + i) % 251 for i in range(header.nbytes)))


def attention_tensors(prefix: str = "") -> Tensors:
    return {
        f"{prefix}{name}": tensor("float32", (1, 1, 2, 3), start)
        for start, name in enumerate("qkv")
    }


def row(*values: float) -> tuple[wire.Header, memoryview]:
    """A tensor (1, n)."""
    data = np.array([values], "<f4")
    return wire.Header("float32", data.shape), memoryview(data.tobytes())


EVERY_OPTION: dict[str, Any] = {
    "scale": 1,
    "causal": True,
    "causal_align": "top_left",
    "window": (7, -1),
    "softcap": 30,
    "dropout": {"p": 0.1, "seed": 2**64 - 1},
    "layout": "blhd",
    "precision": "tf32",
    "backend": "reference",
    "return_lse": True,
    "save_for_backward": True,
}
EVERY_TENSOR: Tensors = {
    "sinks": tensor("float64", (2,), 1),
    "alibi_slopes": tensor("float32", (2, 2), 2),
    "bias": tensor("bfloat16", (1, 2, 1, 5), 3),
    "mask": (wire.Header("bool", (1, 5)), memoryview(b"\1\0\1\1\0")),
    "v": tensor("float16", (2, 5, 1, 3), 4),
    "k": tensor("float16", (2, 5, 1, 4), 5),
    "q": tensor("float16", (2, 3, 2, 4), 6),
}
PACKED: Tensors = {
    name: tensor("bfloat16", (4, 1, 2), start) for start, name in enumerate("qkv")
} | {
    "cu_seqlens_q": tensor("int32", (3,)),
    "cu_seqlens_k": tensor("int64", (3,)),
}
MESSAGES: dict[str, tuple[wire.Schema, dict[str, Any], Tensors]] = {
    "attention": (wire.ATTENTION, {}, {"q": row(1, 0), "k": row(0, 1), "v": row(2, 3)}),
    "attention_every_option": (wire.ATTENTION, wire.canonical(EVERY_OPTION), EVERY_TENSOR),
    "attention_packed": (wire.ATTENTION, wire.canonical({"causal": True}), PACKED),
    "attention_empty": (
        wire.ATTENTION, {}, {name: tensor("float16", (0, 1, 0, 8)) for name in "qkv"},
    ),
    "backward_residual": (
        wire.BACKWARD,
        wire.canonical({"residual": "AbC-_09", "release": True, "bias_grad": True}),
        {"dlse": tensor("float32", (1, 1, 2)), "dout": tensor("float32", (1, 1, 2, 3))},
    ),
    "backward_stateless": (
        wire.BACKWARD,
        wire.canonical({"causal": True, "sinks_grad": True}),
        attention_tensors()
        | {
            "sinks": tensor("float32", (1,)),
            "dout": tensor("float32", (1, 1, 2, 3), 9),
            "lse": tensor("float32", (1, 1, 2), 8),
            "out": tensor("float32", (1, 1, 2, 3), 7),
        },
    ),
    "check": (
        wire.CHECK,
        {"request": wire.canonical({"causal": True, "scale": 0.5}), "backends": ["cpu", "triton"]},
        attention_tensors("request.")
        | {"mine.out": tensor("float32", (1, 1, 2, 3)), "dout": tensor("float32", (1, 1, 2, 3))},
    ),
    "reply_attention": (
        wire.REPLY,
        {
            "residual": "AbC-_09",
            "meta": {
                "backend": "cpu",
                "device": "cpu",
                "skipped": [{"backend": "triton", "reasons": ["no CUDA device"]}],
                "precision": "ieee",
                "timings_ms": {"queue": 0.25, "compute": 1.5, "total": 2.0},
            },
        },
        {"lse": tensor("float32", (1, 1, 2)), "out": tensor("float32", (1, 1, 2, 3))},
    ),
    "reply_gradients": (
        wire.REPLY,
        {"meta": {"backend": "cpu"}},
        {
            name: tensor("float32", (1, 1, 2, 3), start)
            for start, name in enumerate(("dsinks", "dbias", "dv", "dk", "dq"))
        },
    ),
}  # fmt: skip
PLAN_OPTIONS = {"causal": True, "sram_elements": 131072}
PLAN_HEADERS = {
    "k": wire.Header("float16", (1, 1, 8, 128)),
    "q": wire.Header("float16", (1, 1, 4, 128)),
}


def plan_bytes() -> bytes:
    return b"".join(wire.lay_out(PLAN_OPTIONS, PLAN_HEADERS, payload=False).buffers({}))


@pytest.mark.parametrize("name", MESSAGES)
def test_encoder_writes_the_golden_bytes(name: str) -> None:
    _, options, tensors = MESSAGES[name]
    assert wire.encode(options, tensors) == (GOLDEN / f"{name}.msgpack").read_bytes()


@pytest.mark.parametrize("name", [name for name in MESSAGES if not name.startswith("reply")])
def test_order_of_arguments_does_not_matter(name: str) -> None:
    _, options, tensors = MESSAGES[name]
    turned = {key: tensors[key] for key in reversed(tensors)}
    assert wire.encode(dict(reversed(options.items())), turned) == wire.encode(options, tensors)


@pytest.mark.parametrize("name", MESSAGES)
def test_decoder_reads_the_golden_bytes(name: str) -> None:
    schema, options, tensors = MESSAGES[name]
    data = (GOLDEN / f"{name}.msgpack").read_bytes()
    message = wire.decode(data, schema)
    groups = {"mine": {}} if name == "check" else {}
    assert message.options == groups | options
    found = {
        key: (ref.header, b"".join(data[at : at + n] for at, n in ref.segments))
        for key, ref in message.tensors.items()
    }
    assert found == {key: (header, bytes(raw)) for key, (header, raw) in tensors.items()}


@pytest.mark.parametrize("name", MESSAGES)
def test_payloads_are_aligned(name: str) -> None:
    schema, _, _ = MESSAGES[name]
    message = wire.decode((GOLDEN / f"{name}.msgpack").read_bytes(), schema)
    assert all(ref.segments[0][0] % 64 == 0 for ref in message.tensors.values() if ref.segments)


@pytest.mark.parametrize("name", [*MESSAGES, "plan"])
def test_golden_bytes_are_msgpack_to_others(name: str) -> None:
    """The reference implementation reads the same maps, in the order the contract gives."""
    value = msgpack.unpackb((GOLDEN / f"{name}.msgpack").read_bytes())
    order = {key: rank for rank, key in enumerate((*wire.OPTION_ORDER, "request", "mine"))}
    order |= {key: 100 + rank for rank, key in enumerate(wire.TENSOR_ORDER)}
    known = [key for key in value if key in order]
    assert known == sorted(known, key=order.__getitem__)
    for key in known:
        if order[key] >= 100:
            assert list(value[key]) in (
                ["dtype", "shape", "data"], ["dtype", "shape", "pad", "data"], ["dtype", "shape"],
            )  # fmt: skip


def test_plan_is_described_without_data() -> None:
    data = (GOLDEN / "plan.msgpack").read_bytes()
    assert plan_bytes() == data
    message = wire.decode(data, wire.PLAN)
    assert message.options == PLAN_OPTIONS
    assert {name: ref.header for name, ref in message.tensors.items()} == PLAN_HEADERS
    assert all(ref.segments == () for ref in message.tensors.values())


def test_smallest_message_by_hand() -> None:
    """Written out from the msgpack specification, not by any code."""
    by_hand = (
        b"\x83"  # map of 3
        b"\xa1q\x84" b"\xa5dtype\xa7float32" b"\xa5shape\x92\x01\x02"
        b"\xa3pad\xc4\x18" + bytes(24) + b"\xa4data\xc4\x08" b"\0\0\x80\x3f" b"\0\0\0\0"
        b"\xa1k\x84" b"\xa5dtype\xa7float32" b"\xa5shape\x92\x01\x02"
        b"\xa3pad\xc4\x11" + bytes(17) + b"\xa4data\xc4\x08" b"\0\0\0\0" b"\0\0\x80\x3f"
        b"\xa1v\x84" b"\xa5dtype\xa7float32" b"\xa5shape\x92\x01\x02"
        b"\xa3pad\xc4\x11" + bytes(17) + b"\xa4data\xc4\x08" b"\0\0\0\x40" b"\0\0\x40\x40"
    )  # fmt: skip
    _, options, tensors = MESSAGES["attention"]
    assert wire.encode(options, tensors) == by_hand


def write_files() -> None:
    for name, (_, options, tensors) in MESSAGES.items():
        (GOLDEN / f"{name}.msgpack").write_bytes(wire.encode(options, tensors))
    (GOLDEN / "plan.msgpack").write_bytes(plan_bytes())


if __name__ == "__main__":
    write_files()

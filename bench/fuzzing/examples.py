"""Good bodies to start from: the golden messages, and some that a server answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashwire import wire
from fuzzing.mutating import Example

_GOLDEN = Path(__file__).parents[2] / "tests" / "wire" / "golden"


def examples() -> list[Example]:
    """Golden messages have names that begin with what they are for."""
    golden = [
        Example(path.name.partition(".")[0].partition("_")[0], path.read_bytes())
        for path in sorted(_GOLDEN.glob("*.msgpack"))
    ]
    return [*golden, *_answerable()]


def _answerable() -> Iterator[Example]:
    q, k = (2, 4, 5, 3), (2, 2, 6, 3)
    shapes = {"q": q, "k": k, "v": k, "bias": (4, 5, 6), "sinks": (4,)}
    options = {"causal": True, "window": [4, 0], "softcap": 3.0, "dropout": {"p": 0.25, "seed": 7}}
    yield Example("attention", _message(options | {"save_for_backward": True}, shapes))
    asked = {"bias_grad": True, "sinks_grad": True}
    yield Example("backward", _message(options | asked, shapes | {"dout": q}))
    request = {f"request.{name}": shape for name, shape in shapes.items()}
    mine = {"mine.out": q, "mine.dq": q, "mine.dk": k, "mine.dv": k}
    yield Example("check", _message({"request": options}, request | mine | {"dout": q}))
    headers = {name: wire.Header("bfloat16", (1, 8, 512, 64)) for name in "qkv"}
    (text,) = wire.lay_out({"causal": True}, headers, payload=False).texts
    yield Example("plan", text[1])


def _message(options: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        data = rng.standard_normal(shape).astype("<f4")
        tensors[name] = wire.Header("float32", shape), memoryview(data.tobytes())
    return wire.encode(options, tensors)

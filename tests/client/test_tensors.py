"""Logical values in C order, little-endian, whatever the array; and back, owned and writable."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from flashwire import errors
from flashwire.tensors import Payload, dtype_name, home_of, pack, unpack
from flashwire.wire import Header, TensorRef

BF16 = np.dtype(ml_dtypes.bfloat16)


def back(payload: Payload, like: Any) -> Any:
    """The payload as it arrives, in two pieces at odd places."""
    size, cut = len(payload.data), len(payload.data) // 3
    body = np.concatenate(
        [np.full(7, 255, np.uint8), np.frombuffer(payload.data[:cut], np.uint8),
         np.full(5, 255, np.uint8), np.frombuffer(payload.data[cut:], np.uint8)]
    )  # fmt: skip
    segments = tuple((a, n) for a, n in ((7, cut), (12 + cut, size - cut)) if n)
    ref = TensorRef(payload.header.dtype, payload.header.shape, segments)
    return unpack(ref, body, home_of(like))


def read_only() -> np.ndarray:
    array = np.arange(3.0)
    array.flags.writeable = False
    return array


ARRAYS = {
    "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
    "big-endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "big-endian offsets": np.array([0, 3, 9], ">i4"),
    "Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "reversed": np.arange(6, dtype=np.float16)[::-1],
    "strided": np.arange(12.0).reshape(3, 4)[::2, 1::2],
    "broadcast": np.broadcast_to(np.float32(3), (2, 2)),
    "broadcast row": np.broadcast_to(np.arange(3.0), (4, 3)),
    "read-only": read_only(),
    "zero-size": np.zeros((0, 3), np.float16),
    "zero-size in the middle": np.zeros((2, 0, 3), ">f8"),
    "rank 0": np.array(2.5),
    "scalar": np.float32(2.5),
    "bool": np.array([[True, False]]).T,
    "bfloat16": np.array([0.01, 1, -2.5, 3e38, np.nan], BF16)[::-1],
    "big-endian bfloat16": np.array([1, 2.5, -0.01], BF16).astype(BF16.newbyteorder(">")),
    "misaligned": np.frombuffer(bytes(1) + np.arange(3.0).tobytes(), np.uint8)[1:].view(np.float64),
    "NaN with a payload": np.array([0x7FC01234, 0xFFC00001], np.uint32).view(np.float32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy(name: str) -> None:
    array = ARRAYS[name]
    payload = pack("q", array)
    wide = "bfloat16" in name
    little = np.asarray(array).astype(BF16 if wide else array.dtype.newbyteorder("<"))
    assert payload.header == Header(array.dtype.name, array.shape)
    assert bytes(payload.data) == little.tobytes()
    found = back(payload, array)
    assert found.dtype == little.dtype
    assert found.shape == array.shape
    assert found.tobytes() == little.tobytes()
    assert found.flags.writeable
    assert found.flags.owndata
    assert found.flags.c_contiguous


TENSORS = {
    "plain": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(24).reshape(1, 3, 2, 4).float().transpose(1, 2),
    "expanded": torch.ones(1).expand(3, 3),
    "one element of stride 0": torch.tensor(2.0).expand(1, 1),
    "strided": torch.arange(12.0)[1::3],
    "bfloat16": torch.tensor([0.01, 1.0, -2.5, 3e38], dtype=torch.bfloat16),
    "zero-size": torch.zeros(0, 3, dtype=torch.bfloat16),
    "rank 0": torch.tensor(1.5, dtype=torch.float16),
    "requires grad": torch.ones(2, requires_grad=True),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([0, 2**40]),
    "negated view": torch._neg_view(torch.arange(3.0)),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_torch(name: str) -> None:
    tensor = TENSORS[name]
    payload = pack("q", tensor)
    found = back(payload, tensor)
    assert payload.header.dtype == str(tensor.dtype).removeprefix("torch.")
    assert (found.dtype, found.device, found.shape) == (tensor.dtype, tensor.device, tensor.shape)
    assert torch.equal(found, tensor)
    assert not found.requires_grad
    assert found.is_contiguous()


@pytest.mark.parametrize("array", [np.arange(6.0), torch.arange(6.0), np.zeros(3, BF16)])
def test_what_lies_right_is_not_copied(array: Any) -> None:
    payload = pack("q", array)
    array[0] = 7
    assert bytes(payload.data) == bytes(pack("q", array).data)


def test_bfloat16_keeps_every_bit() -> None:
    patterns = np.arange(2**16, dtype=np.uint16).view(BF16)
    assert bytes(pack("v", patterns).data) == patterns.tobytes()
    assert back(pack("v", patterns), patterns).tobytes() == patterns.tobytes()
    as_torch = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
    assert bytes(pack("v", as_torch).data) == patterns.tobytes()
    assert torch.equal(
        back(pack("v", as_torch), as_torch).view(torch.int16), as_torch.view(torch.int16)
    )


def nearest_even(wide: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16 by exhaustive search, ties to the even pattern. Finite only."""
    grid = np.arange(0x7F80 + 1, dtype=np.uint16).view(BF16).astype(np.float64)
    grid[-1] = 2.0**128  # where the value after the largest would be
    above = np.clip(np.searchsorted(grid, np.abs(wide)), 1, 0x7F80)
    low, high = np.abs(wide) - grid[above - 1], grid[above] - np.abs(wide)
    bits = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (bits | np.where(np.signbit(wide), 0x8000, 0)).astype(np.uint16)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("home", ["numpy", "torch"])
def test_rounding_is_to_nearest_even_and_once(kind: Any, home: str) -> None:
    rng = np.random.default_rng(3)
    ties = np.arange(0x3F80, 0x3FC0, dtype=np.uint32) << 16 | 0x8000
    values = ties.view(np.float32).astype(kind)
    near = [values, np.nextafter(values, kind(0)), np.nextafter(values, kind(9)), -values]
    scales = kind(2.0) ** rng.integers(-140, 127, 500)
    near += [
        rng.standard_normal(500).astype(kind) * scales,
        kind([0, 0.01, 3.39e38, 3.4e38, 1e-45]),
    ]
    wide = np.concatenate(near)
    given = torch.from_numpy(wide) if home == "torch" else wide
    payload = pack("q", given, "bfloat16")
    assert payload.header.dtype == "bfloat16"
    found = np.frombuffer(payload.data, np.uint16)
    np.testing.assert_array_equal(found, nearest_even(wide.astype(np.float64)))


@pytest.mark.parametrize("home", ["numpy", "torch"])
def test_rounding_of_what_is_not_finite(home: str) -> None:
    wide = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, -0.0])
    for dtype in ("bfloat16", "float16", "float32"):
        payload = pack("q", torch.from_numpy(wide) if home == "torch" else wide, dtype)
        found = back(payload, wide).astype(np.float64)
        np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf, np.inf, -np.inf, -0.0])
        assert np.signbit(found[-1])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("q", [1.0, 2.0], "q: must be a NumPy array or a torch tensor, got list"),
        ("q", None, "got NoneType"),
        ("q", np.ma.array([1.0, 2.0], mask=[0, 1]), "got MaskedArray"),
        ("q", np.array(["a"]), "dtype str32 does not travel"),
        ("q", np.zeros(2, np.complex64), "dtype complex64 does not travel; known: bool, float16"),
        ("q", np.zeros(2, np.longdouble), "does not travel"),
        ("mask", np.zeros(2, np.uint8), "mask: dtype uint8 does not travel"),
        ("mask", torch.zeros(2, dtype=torch.uint8), "mask: dtype uint8 does not travel"),
        ("q", torch.zeros(2, 2).to_sparse(), "q: must be a dense tensor"),
        ("q", torch.zeros(2, device="meta"), "q: must be a dense tensor"),
        ("cu_seqlens_q", [0, 1.0], "cu_seqlens_q: must hold integers only"),
        ("cu_seqlens_q", [0, True], "cu_seqlens_q: must hold integers only"),
        ("cu_seqlens_q", [0, 2**63], "does not fit in 64 bits"),
    ],
)
def test_what_does_not_travel(name: str, value: Any, words: str) -> None:
    with pytest.raises(errors.Invalid) as caught:
        pack(name, value)
    assert words in str(caught.value)
    assert caught.value.field == name


@pytest.mark.parametrize("value", [np.arange(3), torch.arange(3), np.array([True])])
def test_only_floats_are_rounded(value: Any) -> None:
    with pytest.raises(errors.Invalid, match="which is not rounded to bfloat16"):
        pack("q", value, "bfloat16")


def test_names_of_dtypes() -> None:
    for given in ("bf16", "bfloat16", torch.bfloat16, ml_dtypes.bfloat16, BF16):
        assert dtype_name(given) == "bfloat16"
    for given in ("fp32", "float32", np.float32, np.dtype("f4"), torch.float32):
        assert dtype_name(given) == "float32"
    for given in ("int32", "float8", torch.int64, np.int32, None, "bflaot16"):
        with pytest.raises(errors.Invalid, match=r"dtype '.*' is not known"):
            dtype_name(given)

"""What a decoder refuses, with which code and field, and that it allocates nothing for a claim."""

import tracemalloc
from typing import Any

import msgpack
import pytest

from flashwire import wire

V = {"dtype": "float32", "shape": [2], "data": bytes(8)}
QKV = {"q": V, "k": V, "v": V}
DATA24 = bytes(24)


def refused(data: bytes, schema: wire.Schema = wire.ATTENTION, **limits: Any) -> wire.WireError:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(data, schema, wire.Limits(**limits))
    return caught.value


def pack(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


MALFORMED = {
    "empty": (b"", None, "truncated"),
    "json": (b'{"q": 1}', None, "not a msgpack map"),
    "a list": (pack([1]), None, "not a msgpack map"),
    "never used byte": (b"\x81\xa5scale\xc1", "scale", "0xc1"),
    "trailing bytes": (pack(QKV) + b"\0", None, "bytes follow"),
    "truncated": (pack(QKV)[:-1], None, "truncated"),
    "repeated option": (b"\x82\xa6causal\xc2\xa6causal\xc3", "causal", "repeated"),
    "repeated tensor": (b"\x82" + pack({"q": V})[1:] * 2, "q", "repeated"),
    "repeated in tensor": (
        b"\x81\xa1q\x82\xa5dtype\xa7float32\xa5dtype\xa7float64", "q.dtype", "repeated",
    ),
    "repeated in option": (b"\x81\xa7dropout\x82\xa1p\x00\xa1p\x00", "dropout.p", "repeated"),
    "integer key": (pack({1: 2}), None, "keys of a map must be strings"),
    "bin key": (pack({b"q": 2}), None, "keys of a map must be strings"),
    "integer key in option": (pack({"dropout": {1: 2}}), "dropout", "must be strings"),
    "extension": (pack({"scale": msgpack.ExtType(4, b"abcd")}), "scale", "extension"),
    "timestamp": (pack({"scale": msgpack.Timestamp(1)}), "scale", "extension"),
    "bad utf-8 key": (b"\x81\xa2\xff\xfe\xc0", None, "UTF-8"),
    "bad utf-8 value": (b"\x81\xa6layout\xa2\xff\xfe", "layout", "UTF-8"),
    "surrogate": (b"\x81\xa6layout\xa3\xed\xa0\x80", "layout", "UTF-8"),
    "data too short": (pack(QKV | {"k": V | {"data": bytes(7)}}), "k", "7 bytes, float32"),
    "data before header": (
        pack({"q": {"data": bytes(9), "shape": [2], "dtype": "float32"}}), "q", "needs 8",
    ),
    "huge map": (b"\xdf\xff\xff\xff\xff", None, "4294967295 keys, the limit is 64"),
    "huge list": (b"\x81\xa6window\xdd\xff\xff\xff\xff", None, "exceeds 65536 bytes"),
    "huge string": (b"\x81\xa6layout\xdb\xff\xff\xff\xff", None, "exceeds 65536 bytes"),
    "huge key": (b"\x81\xdb\xff\xff\xff\xff", None, "exceeds 65536 bytes"),
    "huge map in option": (b"\x81\xa7dropout\xdf\xff\xff\xff\xff", "dropout", "the limit is 64"),
    "huge tensor map": (b"\x81\xa1q\xdf\xff\xff\xff\xff", None, "exceeds 65536 bytes"),
    "nested": (b"\x81\xa6window" + b"\x91" * 100 + b"\xc0", "window", "deeper than 8"),
    "nested in maps": (
        b"\x81\xa6window" + b"\x81\xa1a" * 100 + b"\xc0", "window" + ".a" * 7, "deeper than 8",
    ),
    "rank": (pack({"q": V | {"shape": [1] * 9}}), "q", "9 dimensions, the limit is 8"),
    "pad too long": (pack({"q": {"pad": bytes(64)} | V}), "q", "at most 63"),
    "pad not zero": (pack({"q": {"pad": b"\0\1"} | V}), "q", "zero bytes"),
    "pieces too small": (pack({"q": V | {"data": [bytes(4), bytes(4)]}}), "q", "2 pieces"),
    "empty piece": (pack({"q": {"data": [b""], "shape": [0], "dtype": "bool"}}), "q", "pieces"),
    "small pieces first": (pack({"q": {"data": [bytes(4), bytes(4)]}}), "q", "1073741824"),
}  # fmt: skip
INVALID = {
    "unknown option": (pack({"causl": True}), "causl", "did you mean 'causal'"),
    "unknown tensor": (pack({"kk": V}), "kk", "did you mean 'k'"),
    "far from anything": (pack({"zzzzzz": 1}), "zzzzzz", "known: alibi_slopes"),
    "dotted": (pack({"request.q": V}), "request.q", "no dot"),
    "dtype": (pack({"q": V | {"dtype": "float3"}}), "q", "did you mean 'float32'"),
    "big endian": (pack({"q": V | {"dtype": ">f4"}}), "q", "'>f4' is not known; known: bool"),
    "dtype no string": (pack({"q": V | {"dtype": 4}}), "q", "dtype must be a string, got int"),
    "no dtype": (pack({"q": {"shape": [2], "data": bytes(8)}}), "q", "lacks dtype"),
    "no shape nor data": (pack({"q": {"dtype": "bool"}}), "q", "lacks shape and data"),
    "key of tensor": (pack({"q": V | {"strides": [1]}}), "q", "'strides' is not known; known"),
    "data a string": (pack({"q": V | {"data": "abcdefgh"}}), "q", "data must be bin"),
    "data a number": (pack({"q": V | {"data": 1}}), "q", "data must be bin"),
    "data a list": (pack({"q": {"data": [1]}}), "q", "data must be bin"),
    "pad a string": (pack({"q": {"pad": ""} | V}), "q", "pad must be bin, got str"),
    "tensor a number": (pack({"q": 1}), "q", "must be a tensor"),
    "tensor a list": (pack({"q": [1, 2]}), "q", "must be a tensor"),
    "float offsets": (pack({"cu_seqlens_q": [0, 1.5]}), "cu_seqlens_q", "integers only"),
    "boolean offsets": (pack({"cu_seqlens_q": [0, True]}), "cu_seqlens_q", "integers only"),
    "version": (pack({"version": 2}), "version", "must be 1, got 2"),
    "version true": (pack({"version": True}), "version", "must be 1, got True"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    data, field, words = MALFORMED[name]
    error = refused(data)
    assert (error.code, error.field) == ("malformed", field)
    assert words in error.detail


@pytest.mark.parametrize("name", INVALID)
def test_invalid(name: str) -> None:
    data, field, words = INVALID[name]
    error = refused(data)
    assert (error.code, error.field) == ("invalid", field)
    assert words in error.detail


@pytest.mark.parametrize(
    "shape",
    [[-1, 4], [2, -3], [1e9, 1e9], [True, 4], "-1", None, 6, {"a": 1}, [None], [[6]], ["6"]],
)
def test_shapes_that_are_none_are_malformed(shape: Any) -> None:
    """S04, but for sizes that are merely too large."""
    error = refused(pack(QKV | {"q": {"dtype": "float32", "shape": shape, "data": DATA24}}))
    assert (error.code, error.field) == ("malformed", "q")
    assert "non-negative integers" in error.detail


@pytest.mark.parametrize("shape", [[2**32, 2**32], [2**64 - 1] * 8, [0, 2**63], [2**31, 2**31, 4]])
@pytest.mark.parametrize("order", [("dtype", "shape", "data"), ("data", "shape", "dtype")])
def test_claimed_sizes_are_compared_and_not_allocated(shape: list[int], order: list[str]) -> None:
    """S04. 2**31 * 2**31 * 4 elements of 4 bytes are 2**66 bytes: 0 in 64-bit arithmetic."""
    values = {"dtype": "float32", "shape": shape, "data": DATA24}
    data = pack(QKV | {"q": {key: values[key] for key in order}})
    tracemalloc.start()
    try:
        error = refused(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.code, error.field) == ("malformed", "q")
    assert "24 bytes" in error.detail
    assert peak < 200_000


@pytest.mark.parametrize("claim", [b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"])
def test_data_that_never_comes_is_truncated_at_once(claim: bytes) -> None:
    """With Content-Length known, a claim beyond it ends the request before its body has come."""
    head = b"\x81\xa1q\x83\xa5dtype\xa4bool\xa5shape\x91\xce\xff\xff\xff\xff\xa4data" + claim
    decoder = wire.Decoder(wire.ATTENTION, total=len(head) + 24)
    with pytest.raises(wire.WireError) as caught:
        decoder.advance(memoryview(head), len(head))
    assert caught.value.code == "malformed"


def test_claims_beyond_the_servers_limit_end_a_chunked_upload() -> None:
    head = b"\x81\xa1q\x83\xa5dtype\xa4bool\xa5shape\x91\xce\x01\0\0\0\xa4data\xc6\x01\0\0\0"
    decoder = wire.Decoder(wire.ATTENTION, wire.Limits(max_message=2**20))
    with pytest.raises(
        wire.WireError, match=f"claims {2**24 + len(head)} bytes, the limit is 1048576"
    ) as caught:
        decoder.advance(memoryview(head), len(head))
    assert caught.value.code == "too_large"


def test_a_message_shorter_than_its_length_has_bytes_behind_it() -> None:
    data = pack(QKV)
    decoder = wire.Decoder(wire.ATTENTION, total=len(data) + 5)
    with pytest.raises(wire.WireError, match="bytes follow the end"):
        decoder.advance(memoryview(data), len(data))


def test_limits_are_limits() -> None:
    options = {"window": [1] * 100}
    assert wire.decode(pack(options), wire.ATTENTION).options == options
    assert refused(pack(options), max_header=100).field is None
    assert refused(pack({"scale": 1, "causal": True}), max_keys=1).detail.startswith("has 2 keys")
    assert refused(pack({"dropout": {"p": 1}}), max_depth=1).field == "dropout"
    assert refused(pack({"q": V}), max_rank=0).field == "q"
    assert refused(pack({"q": V}), max_elements=0).detail.endswith("the limit is 0")
    described = {"q": {"dtype": "float32", "shape": [2**40, 2**40]}}  # a plan: no data, no claim
    assert wire.decode(pack(described), wire.PLAN, wire.Limits(max_elements=0))


def test_payloads_do_not_count_as_header() -> None:
    big = {"dtype": "bool", "shape": [50_000], "data": bytes(50_000)}
    message = wire.decode(pack({"q": big, "k": big, "v": big, "causal": True}), wire.ATTENTION)
    assert [ref.nbytes for ref in message.tensors.values()] == [50_000] * 3


def test_null_is_absent() -> None:
    data = pack(QKV | {"mask": None, "scale": None, "cu_seqlens_q": None})
    message = wire.decode(data, wire.ATTENTION)
    assert set(message.tensors) == {"q", "k", "v"}
    assert message.options == {"scale": None}
    assert wire.decode(pack({"mine": None}), wire.CHECK) == wire.Message()


def test_offsets_may_be_a_plain_list() -> None:
    message = wire.decode(pack(QKV | {"cu_seqlens_q": [0, 2**40]}), wire.ATTENTION)
    assert message.options == {"cu_seqlens_q": [0, 2**40]}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("request", 1, "must be a map"),
        ("request.q", {"request": {"q": 1}}, "must be a tensor"),
        ("request.sclae", {"request": {"sclae": 1}}, "'scale'"),
        ("mine.q", {"mine": {"q": V}}, "'dq'"),
        ("q", {"q": V}, "known: backends, dout, mine, request, version"),
    ],
)
def test_nested_names(field: str, value: Any, words: str) -> None:
    error = refused(pack({"request": value} if isinstance(value, int) else value), wire.CHECK)
    assert (error.code, error.field) == ("invalid", field)
    assert words in error.detail


def test_a_reply_may_have_names_unknown_to_this_version() -> None:
    message = wire.decode(pack({"out": V, "new": {"a": [1, None]}}), wire.REPLY)
    assert message.options == {"new": {"a": [1, None]}}


def test_numbers_of_every_size() -> None:
    values = [0, 127, 128, 255, 2**16, 2**32, 2**64 - 1, -1, -32, -33, -129, -(2**31), -(2**63)]
    values += [0.5, float("inf")]
    assert wire.decode(pack({"window": values}), wire.ATTENTION).options == {"window": values}
    single = b"\x81\xa5scale\xca\x3f\x00\x00\x00"
    assert wire.decode(single, wire.ATTENTION).options == {"scale": 0.5}
    long = {"residual": "a" * 300, "backend": b"b" * 300}
    assert wire.decode(pack(long), wire.BACKWARD).options == long


def test_names_are_repeated_in_errors_up_to_a_length() -> None:
    error = refused(pack({"a" * 10_000: 1}))
    assert error.field == "a" * 200
    assert len(str(error)) < 1000


def test_hook_sees_a_header_before_its_payload() -> None:
    seen = []
    header = wire.Header("float32", (1000, 1000))
    data = wire.encode({}, {"q": (header, memoryview(bytes(4_000_000)))})
    decoder = wire.Decoder(
        wire.ATTENTION, total=len(data), on_header=lambda name, h: seen.append((name, h))
    )
    assert not decoder.advance(memoryview(data), 100)
    assert seen == [("q", header)]
    assert decoder.need == len(data)
    assert decoder.advance(memoryview(data), len(data))
    assert seen == [("q", header)]


def test_what_the_hook_raises_ends_the_upload() -> None:
    def refuse(name: str, header: wire.Header) -> None:
        raise LookupError(name)

    data = pack(QKV)
    decoder = wire.Decoder(wire.ATTENTION, on_header=refuse)
    with pytest.raises(LookupError, match="q"):
        decoder.advance(memoryview(data), 30)


def test_message_before_its_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="not complete"):
        _ = wire.Decoder(wire.ATTENTION).message

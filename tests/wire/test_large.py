"""Payloads above 4 GiB, on sparse memory: only the bytes between payloads are ever touched."""

import mmap
import os

import pytest

from flashwire import wire

GIB = 2**30


def test_payload_above_4_gib_is_bins_of_1_gib() -> None:
    shape = (5, GIB // 2 + 1)
    layout = wire.lay_out({}, {"q": wire.Header("float16", shape)})
    sizes = [length for _, length in layout.tensors["q"].segments]
    assert sizes == [GIB] * 5 + [10]
    assert layout.tensors["q"].segments[0][0] % 64 == 0
    gaps = zip(layout.tensors["q"].segments, layout.tensors["q"].segments[1:], strict=False)
    assert all(b - (a + n) == (5 if m == GIB else 2) for (a, n), (b, m) in gaps)


@pytest.mark.parametrize(
    ("elements", "pieces"), [(2**32 - 1, 1), (2**32, 4), (2**32 + 1, 5), (5 * GIB, 5)]
)
def test_large_payloads_are_read_where_they_lie(elements: int, pieces: int) -> None:
    headers = {"q": wire.Header("bool", (elements,)), "k": wire.Header("bool", (3,))}
    layout = wire.lay_out({"causal": True}, headers)
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, layout.size)
    with os.fdopen(fd), mmap.mmap(fd, layout.size) as memory:
        view = memoryview(memory)
        layout.write(view)
        decoder = wire.Decoder(wire.ATTENTION, total=layout.size)
        needs = []
        while not decoder.advance(view, decoder.need):
            needs.append(decoder.need)
        view.release()
    assert decoder.message.tensors == layout.tensors
    assert len(decoder.message.tensors["q"].segments) == pieces
    assert len(needs) < 60


def test_data_first_in_pieces_is_checked_when_the_header_comes() -> None:
    head = b"\x81\xa1q\x83\xa4data\xdd\x00\x00\x00\x01\xc4\x03abc\xa5shape\x91"
    message = wire.decode(head + b"\x03\xa5dtype\xa4bool", wire.ATTENTION)
    assert message.tensors["q"].segments == ((16, 3),)
    with pytest.raises(wire.WireError, match="3 bytes, bool of shape"):
        wire.decode(head + b"\x04\xa5dtype\xa4bool", wire.ATTENTION)

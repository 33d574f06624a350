"""Shared memory: sealed, checked on arrival, released without a trace."""

import fcntl
import functools
import os

import pytest

from flashwire_service.ipc.memory import Memory


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:flashwire" in line for line in maps)


@pytest.mark.parametrize("writable", [False, True])
def test_what_one_side_writes_the_other_reads(writable):
    received = functools.partial(Memory.receive, writable=writable)
    with Memory.create(5000) as ours, received(os.dup(ours.fd), 5000) as theirs:
        ours.view[4990:] = b"0123456789"
        assert theirs.view[4990:] == b"0123456789"
        theirs.view[0] = 7
        assert ours.view[0] == (7 if writable else 0)


def test_memory_passed_on_keeps_its_descriptor_and_maps_when_asked():
    before = mappings()
    with Memory.create(5000) as ours, Memory.adopt(os.dup(ours.fd), 5000) as theirs:
        assert theirs.fd >= 0
        assert mappings() == before
        ours.view[0] = 7
        with theirs.again() as another:
            theirs.close()
            assert another.view[0] == 7


def test_it_cannot_shrink():
    with Memory.create(4096) as memory, pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 1)


def test_a_claim_beyond_what_it_holds_is_refused():
    before = open_fds()
    with Memory.create(4096) as memory, pytest.raises(ValueError, match="4096 bytes that claims"):
        Memory.receive(os.dup(memory.fd), 4097)
    assert open_fds() == before


def test_memory_without_the_seal_is_refused():
    before = open_fds()
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="sealed"):
        Memory.receive(fd, 4096)
    assert open_fds() == before


def test_growing_keeps_what_is_there_and_old_views():
    with Memory.create(10) as memory:
        memory.view[:] = b"0123456789"
        old = memory.view[:5]
        memory.grow(1 << 20)
        assert memory.size == len(memory.view) == 1 << 20
        assert memory.view[:11] == b"0123456789\0"
        memory.view[0:1] = b"x"
        assert old == b"x1234"
        memory.grow(3)
        assert memory.size == 1 << 20


def test_writing_appends_and_grows():
    pieces = [b"ab", b"", memoryview(b"cdef")[::1], bytearray(b"g")]
    with Memory.create() as memory:
        memory.write(pieces)
        memory.write([b"h"] * 3000)
        assert memory.size == 3007
        assert memory.view[:9] == b"abcdefghh"
        assert os.fstat(memory.fd).st_size == 3007


def test_writing_into_given_room_does_not_change_the_size():
    with Memory.create(10) as memory:
        memory.write([b"abc"])
        assert memory.size == 10
        assert memory.view == b"abc" + bytes(7)


def test_zero_bytes_are_fine():
    with Memory.create(0) as memory, Memory.receive(os.dup(memory.fd), 0) as other:
        assert len(memory.view) == len(other.view) == 0
        assert not other.view.readonly


def test_close_releases_all_even_while_a_slice_lives():
    before, mapped = open_fds(), mappings()
    memory = Memory.create(1 << 20)
    piece = memory.view[10:20]
    memory.close()
    memory.close()
    piece[:] = b"still here"
    assert piece == b"still here"
    assert mappings() == mapped + 1
    del piece
    assert mappings() == mapped
    assert open_fds() == before


def test_closed_memory_has_no_view():
    memory = Memory.create(10)
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        _ = memory.view


def test_a_claim_takes_no_room_until_written():
    with Memory.create(1 << 40) as memory:
        assert os.fstat(memory.fd).st_blocks == 0


def test_descriptors_are_close_on_exec():
    with Memory.create(1) as memory:
        assert fcntl.fcntl(memory.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC

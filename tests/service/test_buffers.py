"""Memory that is used again: how much is kept, for whom, and for how long."""

from __future__ import annotations

import os

import pytest

from flashwire_service.front import buffers
from flashwire_service.front.buffers import Buffers

MIB = 2**20


def test_the_one_that_fits_best_is_used_again() -> None:
    kept = Buffers(100 * MIB)
    large, small = kept.take(8 * MIB), kept.take(4 * MIB)
    kept.give_back(small)
    kept.give_back(large)
    assert kept.kept_bytes == 12 * MIB
    assert kept.take(3 * MIB) is small
    assert kept.take(3 * MIB) is large
    assert kept.kept_bytes == 0
    for memory in (large, small):
        memory.close()


def test_a_small_body_does_not_take_a_large_memory() -> None:
    kept = Buffers(100 * MIB)
    kept.give_back(kept.take(8 * MIB))
    other = kept.take(MIB)
    assert other.size == MIB
    assert kept.kept_bytes == 8 * MIB
    other.close()


def test_no_more_is_kept_than_may_be() -> None:
    kept = Buffers(10 * MIB)
    first, second, third = kept.take(6 * MIB), kept.take(4 * MIB), kept.take(11 * MIB)
    for memory in (first, second, third):
        kept.give_back(memory)
    assert kept.kept_bytes == 10 * MIB
    assert third.fd == -1  # larger than all that may be kept: it pushes nothing out for nothing
    fourth = kept.take(1)
    kept.give_back(fourth)
    assert first.fd == -1
    assert kept.kept_bytes == 4 * MIB + 4096


def test_however_small_only_so_many_are_kept() -> None:
    kept = Buffers(10 * MIB)
    memories = [kept.take(4096) for _ in range(buffers.MOST + 3)]
    for memory in memories:
        kept.give_back(memory)
    assert [memory.fd == -1 for memory in memories] == [True] * 3 + [False] * buffers.MOST
    assert kept.kept_bytes == 4096 * buffers.MOST


def test_what_is_not_used_goes_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(buffers.time, "monotonic", lambda: now[0])
    kept = Buffers(10 * MIB)
    old, young = kept.take(MIB), kept.take(MIB)
    kept.give_back(old)
    now[0] += 50
    kept.give_back(young)
    now[0] += 11
    kept.sweep()
    assert (old.fd, kept.kept_bytes) == (-1, MIB)
    now[0] += 50
    before = len(os.listdir("/proc/self/fd"))
    kept.sweep()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert kept.kept_bytes == 0

"""Launch configurations to time: they fit, and the shipped one is among them."""

import dataclasses
import itertools

import pytest

from flashwire_kernels.fused.candidates import (
    candidates,
    registers,
    registers_of,
    shared_bytes,
)
from flashwire_kernels.fused.config import PASSES, SHARED_BYTES, Config, shipped


@pytest.fixture(params=[f"{k}-{f}" for k, f in itertools.product(PASSES, SHARED_BYTES)])
def keys(request):
    """Every shipped place of a pass and family."""
    kind, family = request.param.split("-")
    return [key for key in shipped(kind) if key.family == family]


def test_the_shipped_one_is_first_and_none_comes_twice(keys):
    for key in keys:
        found = candidates(*key)
        assert found[0] == shipped(key.kind)[key]
        assert len(set(found)) == len(found)


def test_all_others_fit(keys):
    for key in keys:
        like_shipped = dataclasses.replace(shipped(key.kind)[key], descriptors=False)
        for config in candidates(*key):
            if dataclasses.replace(config, descriptors=False) == like_shipped:
                continue
            shape = (config, key.item_size, key.dim)
            assert shared_bytes(key.kind, key.family, *shape) <= SHARED_BYTES[key.family]
            assert registers(key.kind, key.family, *shape) <= registers_of(key.family, config.warps)


@pytest.mark.parametrize("family", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", PASSES)
def test_there_is_a_choice(kind, dim, family):
    assert len(candidates(kind, family, 2, dim, False)) >= 5


def test_what_a_program_holds():
    """Against what triton 3.7.1 compiled: 40 KiB of shared memory on sm_90, 24 KiB on sm_80."""
    config = Config(m=64, n=64, warps=4, stages=2)
    assert shared_bytes("forward", "sm_90", config, 2, 64) == 40 << 10
    assert shared_bytes("forward", "sm_80", config, 2, 64) == 24 << 10
    assert shared_bytes("forward", "sm_80", config, 4, 64) == 64 << 10
    # 128 x 128 sums and as many scores over 256 threads, and the scores again as 16-bit operands
    config = Config(m=128, n=128, warps=8, stages=2)
    assert registers("forward", "sm_90", config, 2, 128) == 64 + 64 + 32 + 40


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_descriptors_only_where_there_are_any(family):
    found = {config.descriptors for config in candidates("forward", family, 2, 128, False)}
    assert found == ({False, True} if family == "sm_90" else {False})


def test_a_split_of_a_decode_is_never_less_than_the_memory_estimate_takes_it_for():
    for family in SHARED_BYTES:
        assert all(c.split >= 512 for c in candidates("decode", family, 2, 128, False))

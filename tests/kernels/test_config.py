"""Launch configurations: every place of the shipped tables is filled, with what can be."""

import dataclasses
import itertools

import pytest

from flashwire_kernels.fused.config import (
    PASSES,
    SHARED_BYTES,
    Config,
    Key,
    choose,
    family,
    shipped,
)


@pytest.mark.parametrize(
    "wrong",
    [{"m": 48}, {"n": 8}, {"warps": 3}, {"stages": 0}, {"split": 100}],
    ids=str,
)
def test_a_configuration_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(Config(m=64, n=64), **wrong)


@pytest.mark.parametrize("kind", PASSES)
def test_every_case_has_a_configuration(kind):
    cases = itertools.product(SHARED_BYTES, (2, 4), (64, 128, 256), (False, True))
    assert set(shipped(kind)) == {Key(kind, *case) for case in cases}


@pytest.mark.parametrize(("arch", "name"), [
    ("sm_80", "sm_80"), ("sm_87", "sm_86"), ("sm_89", "sm_86"), ("sm_90", "sm_90"),
    ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("gfx950", "gfx942")])  # fmt: skip
def test_an_architecture_runs_as_its_family(arch, name):
    assert family(arch) == name
    assert (
        choose("keys", arch, 2, 96, modified=False)
        == shipped("keys")[Key("keys", name, 2, 128, False)]
    )


def test_only_tensor_memory_accelerators_get_descriptors():
    for kind in PASSES:
        for key, config in shipped(kind).items():
            assert not config.descriptors or key.family in ("sm_90", "sm_100", "sm_120")

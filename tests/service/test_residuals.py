"""Saved forwards: life, budget, owner, ids."""

import pytest
import torch

from flashwire_kernels.errors import NotEnoughMemory
from flashwire_kernels.types import AttentionSpec
from flashwire_service import residual_id
from flashwire_service.compute.residuals import Gone, Residuals, Saved

KEY = b"k" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def residuals(clock):
    return Residuals(signing_key=KEY, worker=3, ttl_s=10.0, max_bytes=1000, clock=clock)


def saved(nbytes: int) -> Saved:
    """A forward of that many bytes in all."""
    part, rest = torch.zeros(1, dtype=torch.uint8), torch.zeros(nbytes - 2, dtype=torch.uint8)
    return Saved(
        spec=AttentionSpec(),
        tensors={"q": rest},
        out=part,
        lse=part.clone(),
        backend="cpu",
        skipped=(),
    )


def test_what_is_kept_comes_back_more_than_once(residuals):
    forward = saved(100)
    key = residuals.keep(forward, "me")
    assert residuals.get(key, "me") is forward
    assert residuals.get(key, "me") is forward
    assert residuals.held_bytes == 100


def test_its_id_names_worker_and_owner(residuals):
    key = residuals.keep(saved(100), "me")
    assert residual_id.verify(KEY, key, "me") == 3
    assert residual_id.verify(KEY, key, "you") is None


def test_another_owner_cannot_use_or_free_it(residuals):
    key = residuals.keep(saved(100), "me")
    with pytest.raises(Gone):
        residuals.get(key, "you")
    with pytest.raises(Gone):
        residuals.release(key, "you")
    assert residuals.get(key, "me")


def test_release_frees_once(residuals):
    key = residuals.keep(saved(100), "")
    residuals.release(key, "")
    assert residuals.held_bytes == 0
    with pytest.raises(Gone):
        residuals.release(key, "")
    with pytest.raises(Gone):
        residuals.get(key, "")


def test_it_expires(residuals, clock):
    first = residuals.keep(saved(100), "")
    clock.now = 5.0
    second = residuals.keep(saved(200), "")
    clock.now = 9.999
    assert residuals.get(first, "")
    clock.now = 10.0
    residuals.sweep()
    assert residuals.held_bytes == 200
    with pytest.raises(Gone):
        residuals.get(first, "")
    assert residuals.get(second, "")


def test_the_oldest_make_room(residuals):
    keys = [residuals.keep(saved(400), "") for _ in range(3)]
    assert len(residuals) == 2
    assert residuals.held_bytes == 800
    with pytest.raises(Gone):
        residuals.get(keys[0], "")
    assert residuals.get(keys[1], "")
    assert residuals.get(keys[2], "")


def test_one_beyond_the_budget_is_refused_and_costs_nobody_his(residuals):
    key = residuals.keep(saved(900), "")
    with pytest.raises(NotEnoughMemory, match="needs 1001 bytes of memory, 1000 are"):
        residuals.keep(saved(1001), "")
    assert residuals.get(key, "")

"""Saved forwards: life, budget, owner, ids."""

import pytest
import torch

from flashwire_kernels.errors import NotEnoughMemory
from flashwire_kernels.types import AttentionSpec
from flashwire_service import residual_id
from flashwire_service.compute.residuals import OWN_BYTES, Gone, Residuals, Saved

KEY = b"k" * 32
UNIT = 10 * OWN_BYTES


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
    return Residuals(signing_key=KEY, worker=3, ttl_s=10.0, max_bytes=10 * UNIT, clock=clock)


def saved(units: float = 1) -> Saved:
    """A forward that takes so many of the ten units that there are."""
    nbytes = round(units * UNIT) - OWN_BYTES - 2
    part, rest = torch.zeros(1, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return Saved(
        spec=AttentionSpec(),
        tensors={"q": rest},
        out=part,
        lse=part.clone(),
        backend="cpu",
        skipped=(),
    )


def test_what_is_kept_comes_back_more_than_once(residuals):
    forward = saved(1)
    key = residuals.keep(forward, "me")
    assert residuals.get(key, "me") is forward
    assert residuals.get(key, "me") is forward
    assert residuals.held_bytes == UNIT


def test_its_id_names_worker_and_owner(residuals):
    key = residuals.keep(saved(1), "me")
    assert residual_id.verify(KEY, key, "me") == 3
    assert residual_id.verify(KEY, key, "you") is None


def test_another_owner_cannot_use_or_free_it(residuals):
    key = residuals.keep(saved(1), "me")
    with pytest.raises(Gone):
        residuals.get(key, "you")
    with pytest.raises(Gone):
        residuals.release(key, "you")
    assert residuals.get(key, "me")


def test_release_frees_once(residuals):
    key = residuals.keep(saved(1), "")
    residuals.release(key, "")
    assert residuals.held_bytes == 0
    with pytest.raises(Gone):
        residuals.release(key, "")
    with pytest.raises(Gone):
        residuals.get(key, "")


def test_it_expires(residuals, clock):
    first = residuals.keep(saved(1), "")
    clock.now = 5.0
    second = residuals.keep(saved(2), "")
    clock.now = 9.999
    assert residuals.get(first, "")
    clock.now = 10.0
    residuals.sweep()
    assert residuals.held_bytes == 2 * UNIT
    with pytest.raises(Gone):
        residuals.get(first, "")
    assert residuals.get(second, "")


def test_the_oldest_make_room(residuals):
    keys = [residuals.keep(saved(4), "") for _ in range(3)]
    assert len(residuals) == 2
    assert residuals.held_bytes == 8 * UNIT
    with pytest.raises(Gone):
        residuals.get(keys[0], "")
    assert residuals.get(keys[1], "")
    assert residuals.get(keys[2], "")


def test_one_beyond_the_budget_is_refused_and_costs_nobody_his(residuals):
    key = residuals.keep(saved(9), "")
    with pytest.raises(NotEnoughMemory, match=f"{10 * UNIT} are available"):
        residuals.keep(saved(10.1), "")
    assert residuals.get(key, "")


def test_forwards_without_data_are_bounded_too(residuals):
    nothing = torch.zeros(0)
    empty = Saved(
        spec=AttentionSpec(), tensors={}, out=nothing, lse=nothing, backend="cpu", skipped=()
    )
    for _ in range(150):
        residuals.keep(empty, "")
    assert len(residuals) == 100


def lives(residuals, key: str, owner: str) -> bool:
    try:
        residuals.get(key, owner)
    except Gone:
        return False
    return True


def test_an_owner_at_its_limit_loses_its_own_oldest(residuals):
    other = residuals.keep(saved(1), "you", 5 * UNIT)
    keys = [residuals.keep(saved(2), "me", 5 * UNIT) for _ in range(3)]
    assert [lives(residuals, key, "me") for key in keys] == [False, True, True]
    assert lives(residuals, other, "you")
    with pytest.raises(NotEnoughMemory, match=f"{5 * UNIT} are available"):
        residuals.keep(saved(6), "me", 5 * UNIT)
    assert residuals.held_bytes == 5 * UNIT


def test_who_saves_much_pushes_out_nobody_elses(residuals):
    others = [residuals.keep(saved(2), owner) for owner in ("a", "b")]
    keys = [residuals.keep(saved(2), "me") for _ in range(20)]
    assert [lives(residuals, key, "me") for key in keys] == [False] * 17 + [True] * 3
    assert all(map(lives, [residuals] * 2, others, ("a", "b")))


def test_who_holds_more_than_a_share_makes_room_for_who_holds_less(residuals):
    many = [residuals.keep(saved(2), "you") for _ in range(5)]
    mine = [residuals.keep(saved(2), "me") for _ in range(2)]
    assert [lives(residuals, key, "you") for key in many] == [False, False, True, True, True]
    last = residuals.keep(saved(2), "me")  # more than half: its own turn to give way
    assert [lives(residuals, key, "me") for key in (*mine, last)] == [False, True, True]
    assert [lives(residuals, key, "you") for key in many[2:]] == [True] * 3


def test_a_forward_larger_than_what_others_leave_is_refused_before_any_goes(residuals):
    mine = residuals.keep(saved(2), "me")
    others = [residuals.keep(saved(3), owner) for owner in ("a", "b")]
    for attempt in (
        lambda: residuals.keep(saved(5), "me"),
        lambda: residuals.require(5 * UNIT, "me"),
    ):
        with pytest.raises(NotEnoughMemory, match=f"{4 * UNIT} are available"):
            attempt()
    assert lives(residuals, mine, "me")
    assert all(map(lives, [residuals] * 2, others, ("a", "b")))
    residuals.keep(saved(4), "me")
    assert not lives(residuals, mine, "me")


def test_ids_of_an_owner_go_with_its_forwards(residuals, clock):
    keys = [residuals.keep(saved(1), owner) for owner in ("a", "a", "b")]
    residuals.release(keys[0], "a")
    clock.now = 10.0
    residuals.sweep()
    assert (len(residuals), residuals.held_bytes) == (0, 0)
    assert residuals.keep(saved(10), "c")

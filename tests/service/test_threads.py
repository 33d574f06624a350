"""As many threads as a job is worth, and afterwards as many as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashwire_service.compute.threads import Threads


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shapes", "used"),
    [
        ({"q": (1, 2, 16, 32), "k": (1, 2, 16, 32)}, 1),
        ({"q": (1, 16, 2, 32), "k": (1, 16, 2, 32)}, 1),  # rows before heads
        ({"q": (16, 2, 32), "k": (16, 2, 32)}, 1),
        ({"q": (1, 8, 256, 64), "k": (1, 8, 256, 64)}, 2),
        ({"q": (1, 8, 1, 64), "k": (1, 8, 16384, 64)}, 2),
        ({"q": (1, 0, 1, 64), "k": (1, 0, 1, 64)}, 1),
        ({"dout": (1, 2, 16, 32)}, 2),  # who knows
        ({"q": (3,), "k": (3,)}, 2),
    ],
)
def test_threads(shapes: dict[str, tuple[int, ...]], used: int) -> None:
    threads = Threads()
    with threads.fitting({name: torch.empty(shape) for name, shape in shapes.items()}):
        assert torch.get_num_threads() == used
    assert torch.get_num_threads() == 2


def test_after_a_failure() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Threads().fitting({"q": torch.empty(1, 1), "k": torch.empty(1, 1)}),
    ):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2

"""Where tiles end and visible keys do, by every distance between the two."""

import pytest

from flashwire_kernels.fused import config
from flashwire_kernels.testing import Case

TILE = 16


@pytest.fixture
def small_tiles(interpreted, monkeypatch):
    chosen = config.Config(m=TILE, n=TILE, split=64, descriptors=True)
    monkeypatch.setattr(config, "choose", lambda *args, **kwargs: chosen)


def test_every_distance(small_tiles, assert_conforms):
    """Sequences of one tile of queries; the keys that all of them see, more than a tile full, begin
    and end at each place of a tile.
    """
    lens_k = tuple(3 * TILE + n for n in range(TILE))
    case = Case(lens_q=(TILE,) * TILE, lens_k=lens_k, window=(30, 4), heads_q=1, heads_kv=1)
    assert_conforms(case, "triton")


@pytest.mark.long
@pytest.mark.parametrize("window", [(20, 20), (None, 0), (0, None)], ids=str)
def test_every_distance_over_many_tiles(window, small_tiles, assert_conforms):
    lens_k = tuple(40 + n for n in range(TILE))
    case = Case(lens_q=(40,) * TILE, lens_k=lens_k, window=window, heads_q=1, heads_kv=1)
    assert_conforms(case, "triton")

from __future__ import annotations

import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.kv_cache.writing import lanes, targets


@pytest.mark.parametrize("width", [1, 2, 3, 6, 8, 12, 24, 48, 64, 96, 128])
def test_each_channel_is_held_and_stored_once(width):
    held = np.asarray(lanes(width))
    place, is_stored = (np.asarray(x) for x in targets(width))
    assert len(held) == len(place) == pl.next_power_of_2(width)
    assert set(held.tolist()) == set(range(width))
    assert sorted(place[is_stored].tolist()) == list(range(width))
    np.testing.assert_array_equal(held[is_stored], place[is_stored])
    assert len(set(place.tolist())) == len(place)

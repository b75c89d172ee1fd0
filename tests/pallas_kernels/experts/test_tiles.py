from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.experts.tiles import (
    Tiles,
    most_tiles,
    one_for_each_pair,
    places,
    sorted_by_expert,
)
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS


def require_all_pairs(tiles: Tiles, experts: np.ndarray) -> None:
    """Every pair is in one tile, which is its expert's, and ascends there."""
    flat, seen = experts.reshape(-1), []
    assert tiles.count == flat.size
    for expert, pairs in zip(np.asarray(tiles.expert), np.asarray(tiles.pairs), strict=True):
        if expert < 0:
            continue
        held = pairs[pairs < flat.size]
        assert held.size
        np.testing.assert_array_equal(flat[held], expert)
        np.testing.assert_array_equal(pairs[: held.size], np.sort(held))
        seen += [*held]
    np.testing.assert_array_equal(np.sort(seen), np.arange(flat.size))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", ROUTINGS)
def test_sorted_tiles(name):
    tiles = sorted_by_expert(ROUTINGS[name], EXPERTS, 4)
    require_all_pairs(tiles, ROUTINGS[name])
    used = np.asarray(tiles.expert)
    assert (np.diff(used[used >= 0]) >= 0).all()


def test_a_tile_for_each_pair():
    tiles = one_for_each_pair(jnp.asarray(ROUTINGS["mixed"]))
    assert (tiles.pairs, tiles.count) == (None, 10)
    np.testing.assert_array_equal(tiles.expert, ROUTINGS["mixed"].reshape(-1))


@pytest.mark.parametrize("name", ROUTINGS)
def test_places_are_those_of_the_pairs(name):
    tiles = sorted_by_expert(ROUTINGS[name], EXPERTS, 4)
    found = np.asarray(tiles.pairs).reshape(-1)[places(tiles)]
    np.testing.assert_array_equal(found, np.arange(tiles.count))
    alone = one_for_each_pair(jnp.asarray(ROUTINGS[name]))
    np.testing.assert_array_equal(places(alone), np.arange(alone.count))


def test_pairs_of_tiles_that_are_not_used_have_no_place():
    tiles = Tiles(jnp.array([2, -1]), jnp.array([[1, 0, 2], [0, 1, 7]]), 2)
    np.testing.assert_array_equal(places(tiles), [1, 0])


@pytest.mark.parametrize(("pairs", "experts", "tile_m"), [(1, 8, 4), (12, 3, 4), (40, 8, 16)])
def test_the_most_tiles_are_reached(pairs, experts, tile_m):
    """By all others to one expert, or all to one, whichever takes more."""
    spread = [*range(1, min(pairs, experts))]
    counts = np.bincount(spread + [0] * (pairs - len(spread)), minlength=experts)
    assert (-(-counts // tile_m)).sum() == most_tiles(pairs, experts, tile_m)
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = np.bincount(rng.integers(0, experts, pairs), minlength=experts)
        assert (-(-counts // tile_m)).sum() <= most_tiles(pairs, experts, tile_m)

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.experts.counting import counted
from mpjax.kernels.experts.tiles import Tiles, sorted_by_expert
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS


def require_equal(found: Tiles, expected: Tiles) -> None:
    """But for the pairs of unused tiles, which mean nothing."""
    np.testing.assert_array_equal(found.expert, expected.expert)
    used = np.asarray(expected.expert) >= 0
    np.testing.assert_array_equal(np.asarray(found.pairs)[used], np.asarray(expected.pairs)[used])


def many(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 20, (100, 3)).astype(np.int32)


@pytest.mark.parametrize("name", ROUTINGS)
def test_it_gives_the_sorted_tiles(name):
    experts = jnp.asarray(ROUTINGS[name])
    require_equal(
        counted(experts, EXPERTS, 4, interpret=True), sorted_by_expert(experts, EXPERTS, 4)
    )


def test_several_chunks(rng, monkeypatch):
    monkeypatch.setattr("mpjax.kernels.experts.counting.COMPARED", 1024)
    monkeypatch.setattr("mpjax.kernels.experts.counting.PLACED", 128)
    experts = jnp.asarray(many(rng))
    require_equal(counted(experts, 20, 12, interpret=True), sorted_by_expert(experts, 20, 12))


def test_it_lowers(lower_for_cuda):
    experts = jax.ShapeDtypeStruct((64, 8), jnp.int32)
    lowered = lower_for_cuda(functools.partial(counted, count=128, tile_m=16), experts)
    assert "experts_tiles" in lowered


@pytest.mark.gpu
def test_on_the_gpu(rng):
    most = rng.integers(0, 8, (4096, 2)).astype(np.int32)
    cases = (many(rng), 20), (most, 8), (ROUTINGS["all tokens to one"], EXPERTS)
    for experts, count in cases:
        array = jnp.asarray(experts)
        for rows in (8, 80):
            require_equal(counted(array, count, rows), sorted_by_expert(array, count, rows))

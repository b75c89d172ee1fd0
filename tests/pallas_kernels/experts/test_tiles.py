"""Tiles of pairs, and the kernels that take them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import quantize
from mpjax.kernels.experts.counting import counted
from mpjax.kernels.experts.kernels import why_not
from mpjax.kernels.experts.plans import Problem
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


@pytest.mark.parametrize("name", ROUTINGS)
def test_places_are_those_of_the_pairs(name):
    tiles = sorted_by_expert(ROUTINGS[name], EXPERTS, 4)
    found = np.asarray(tiles.pairs).reshape(-1)[places(tiles)]
    np.testing.assert_array_equal(found, np.arange(tiles.count))
    alone = one_for_each_pair(jnp.asarray(ROUTINGS[name]))
    np.testing.assert_array_equal(places(alone), np.arange(alone.count))


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


X = jax.ShapeDtypeStruct((300, 256), jnp.bfloat16)


def struct(text: str) -> Any:
    array = jax.ShapeDtypeStruct((8, 256, 128), jnp.bfloat16)
    return array if text == "bfloat16" else jax.eval_shape(lambda w: quantize(w, text), array)


def reason(name: str, weight: Any, x: Any = X) -> str | None:
    return why_not(name, Problem.of((300, 2), weight, gated=True), x, weight)


def test_reasons_of_each_kernel(pretend_gpu):
    packed, plain = struct("uint4:g128"), struct("bfloat16")
    assert [reason(name, packed) for name in ("triton", "mosaic")] == [None, None]
    assert reason("triton", plain) is None
    assert reason("mosaic", plain) is None
    wide = dataclasses.replace(packed, scale_dtype="bfloat16")
    half = jax.ShapeDtypeStruct(X.shape, jnp.float16)
    assert reason("mosaic", wide) is None
    assert reason("mosaic", plain, half) == (
        "x is float16 and the weight bfloat16, expected one dtype"
    )
    assert reason("mosaic", wide, half) == "scales are bfloat16, whose range float16 does not have"
    single = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    for name in ("triton", "mosaic"):
        assert reason(name, packed, single) == "x is float32, expected bfloat16 or float16"

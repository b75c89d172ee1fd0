from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.attention import combine as combine_module
from mpjax.kernels.attention.combine import (
    FLOOR,
    PARTIALS_AT_ONCE,
    Partials,
    combine,
    combine_balanced,
)


@pytest.mark.parametrize("programs", [1, 1024])
@pytest.mark.parametrize(("splits", "dim"), [(3, 64), (5, 96), (70, 96)])
def test_parts_count_by_their_weights(splits, dim, programs, rng, monkeypatch):
    """A program reads 32 of 70 channels; four heads of few, if there must be few programs."""
    monkeypatch.setattr(combine_module, "ENOUGH_PROGRAMS", programs)
    outputs = rng.standard_normal((3, 2, splits, dim)).astype(np.float32)
    sums = rng.uniform(-200, 200, (3, 2, splits)).astype(np.float32)
    sums[1, 1] = rng.uniform(-1, 1, splits)
    sums[2, :, 1:] = FLOOR
    outputs[0] = 0
    sums[0] = FLOOR  # no part saw a key
    weights = np.exp2(sums.astype(np.float64) - sums.max(-1, keepdims=True))
    expected = (outputs * weights[..., None]).sum(2) / weights.sum(-1)[..., None]
    found = combine(jnp.asarray(outputs), jnp.asarray(sums), jnp.dtype("float32"), interpret=True)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("programs", [1, 5, 1024])
@pytest.mark.parametrize(("own", "dim"), [(1, 64), (2, 96)])
def test_balanced_parts_are_joined_with_pieces_of_their_sequence(
    own, dim, programs, rng, monkeypatch
):
    """Two tokens each, more pieces than are read at once, and NaN in slots that are not written.

    Later pieces have larger peaks, and the last ones smaller. Five programs have two or three of
    the twelve rows each.
    """
    monkeypatch.setattr(combine_module, "ENOUGH_PROGRAMS", programs)
    batch, heads, pieces = 3, 2, 2 * PARTIALS_AT_ONCE + 6
    firsts, lasts = np.array([-1, batch * own, -1]), np.array([7, batch * own + pieces - 1, -9])
    outputs = rng.standard_normal((batch * own + pieces + 4, 2, heads, dim)).astype(np.float32)
    sums = rng.uniform(-9, 9, outputs.shape[:3]).astype(np.float32)
    sums[batch * own + PARTIALS_AT_ONCE :] += 6  # so that what came before shrinks
    sums[batch * own + 2 * PARTIALS_AT_ONCE :] -= 12
    outputs[-4:], sums[-4:] = np.nan, np.nan
    expected = np.empty((batch, 2, heads, dim))
    for b in range(batch):
        slots = [*range(b * own, (b + 1) * own)]
        slots += range(firsts[b], lasts[b] + 1) if firsts[b] >= 0 else []
        weights = np.exp2(sums[slots].astype(np.float64))[..., None]
        expected[b] = (outputs[slots] * weights).sum(0) / weights.sum(0)
    whole = np.zeros((2 * batch, heads, 1, dim), np.float32) if own == 1 else None
    if whole is not None:  # stored already, without a word in the parts
        whole[:2], whole[4:] = 5, 6
        expected[0], expected[2] = 5, 6
    parts = Partials(
        jnp.asarray(outputs.reshape(-1, heads, 1, dim)),
        jnp.asarray(sums.reshape(-1, heads, 1)),
        jnp.asarray(firsts.astype(np.int32)),
        jnp.asarray(lasts.astype(np.int32)),
        None if whole is None else jnp.asarray(whole),
    )
    found = combine_balanced(parts, 2 * batch, jnp.dtype("float32"), own=own, interpret=True)
    found = np.asarray(found).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

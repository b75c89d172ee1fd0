"""The loop around decoding steps, and the conditions that end rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.decoding_state import STOP_IDS, STRIDE, Limits, repeat

pytestmark = pytest.mark.any_version


def test_limits_are_arrays_of_few_sizes():
    limits = Limits.of(3, range(STOP_IDS + 1), 7, room=9)
    assert limits.stop_ids.shape == (2 * STOP_IDS,)
    assert limits.stop_ids[STOP_IDS + 1 :].min() > 2**30, "padding is no token"
    assert limits.maximum.tolist() == [7, 7, 7]
    assert limits.room == 9


@pytest.mark.parametrize("count", [0, 1, 3 * STOP_IDS])
def test_tokens_that_stop_are_known(count):
    """Few stop ids and many, one token and a vocabulary."""
    ids = [2 + 3 * number for number in range(count)]
    limits, vocabulary = Limits.of(1, ids, 7, room=9), np.arange(100).reshape(2, 50)
    np.testing.assert_array_equal(limits.stops(jnp.asarray(vocabulary)), np.isin(vocabulary, ids))
    assert limits.stops(jnp.int32(2)) == (count > 0)


@pytest.mark.parametrize("stride", [1, 4])
def test_steps_are_repeated_until_a_look_finds_the_end(stride):
    end = jax.jit(lambda n: repeat(lambda x: x + 1, lambda x: x < n, jnp.int32(0), stride))
    for number in (0, 1, 4, 6):
        assert end(jnp.int32(number)) == -(-number // stride) * stride


def test_on_a_gpu_looks_are_rare(monkeypatch):
    monkeypatch.setattr("mpjax.kernels.device.on_gpu", lambda: True)
    assert repeat(lambda x: x + 1, lambda x: x < 1, jnp.int32(0), None) == STRIDE

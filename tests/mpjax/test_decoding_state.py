"""The loop around decoding steps, and the conditions that end rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mpjax.decoding_state import STOP_IDS, STRIDE, Limits, repeat

pytestmark = pytest.mark.any_version


def test_limits_are_arrays_of_few_sizes():
    limits = Limits.of(3, range(STOP_IDS + 1), 7, room=9)
    assert limits.stop_ids.shape == (2 * STOP_IDS,)
    assert limits.stop_ids[STOP_IDS + 1 :].min() > 2**30, "padding is no token"
    assert limits.maximum.tolist() == [7, 7, 7]
    assert limits.room == 9


@pytest.mark.parametrize("stride", [1, 4])
def test_steps_are_repeated_until_a_look_finds_the_end(stride):
    end = jax.jit(lambda n: repeat(lambda x: x + 1, lambda x: x < n, jnp.int32(0), stride))
    for number in (0, 1, 4, 6):
        assert end(jnp.int32(number)) == -(-number // stride) * stride


def test_on_a_gpu_looks_are_rare(monkeypatch):
    monkeypatch.setattr("mpjax.kernels.device.on_gpu", lambda: True)
    assert repeat(lambda x: x + 1, lambda x: x < 1, jnp.int32(0), None) == STRIDE

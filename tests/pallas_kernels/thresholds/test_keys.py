from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mpjax.kernels.thresholds.keys import LEAST, key_of, number_of

ORDERED = [-np.inf, -3e38, -1.5, -1e-38, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 1.5, 3e38, np.inf]


def test_keys_are_in_the_order_of_the_numbers():
    keys = np.asarray(key_of(jnp.asarray(ORDERED, jnp.float32)), np.int64)
    assert (np.diff(keys) > 0).all()
    assert keys[0] > LEAST


def test_numbers_come_back_to_the_bit():
    numbers = jnp.asarray(ORDERED, jnp.float32)
    found = number_of(key_of(numbers))
    assert np.asarray(found).tobytes() == np.asarray(numbers).tobytes()


def test_keys_below_all_numbers_are_those_of_minus_infinity():
    assert number_of(jnp.asarray([LEAST, LEAST + 5])).tolist() == [-np.inf] * 2

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mpjax.models.device_sums import LATENCY_BYTES, add_over_devices, add_terms, summing_dtype
from tests.models.test_row_linear import on_one_device, random


def test_sums_that_take_no_longer_are_in_float32():
    assert summing_dtype(LATENCY_BYTES // 4, jnp.bfloat16) == jnp.float32
    assert summing_dtype(LATENCY_BYTES // 4 + 1, jnp.bfloat16) == jnp.bfloat16


def test_terms_become_one():
    terms = random(3, 2, 8)
    found = on_one_device(None, terms, lambda _, x: add_terms(x, jnp.float32, "model"))
    np.testing.assert_allclose(found, terms.sum(0)[None], rtol=1e-6)
    same = on_one_device(None, terms, lambda _, x: add_over_devices(x, "model"))
    np.testing.assert_array_equal(same, terms)

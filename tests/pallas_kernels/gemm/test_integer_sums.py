from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.gemm.integer_sums import OFFSET_BITS, as_float

pytestmark = pytest.mark.any_version


def test_every_sum_below_two_to_the_22_is_exact(rng):
    ends = np.array([-(2**22) + 1, -1, 0, 1, 2**22 - 1], np.int32)
    sums = np.concatenate([ends, rng.integers(ends[0], ends[-1], 10_000, np.int32)])
    found = as_float(jnp.asarray(sums + np.int32(OFFSET_BITS)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, sums)


def test_floats_stay_as_they_are():
    total = jnp.array([0.5, -3.0])
    assert as_float(total) is total

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.gemm.integer_sums import OFFSET_BITS, as_float, scaled, without_last_bits
from mpjax.kernels.target import Target, tracing_for

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


class Fused(Target):
    """A target whose multiply-add rounds once."""

    is_interpreted = False

    def multiply_add(self, factor, other, addend):
        """In float64, which holds products of two float32 numbers."""
        wide = (np.asarray(each, np.float64) for each in (factor, other, addend))
        factor, other, addend = wide
        return (factor * other + addend).astype(np.float32)


@pytest.mark.parametrize("target", [Target(), Fused()])
def test_scaled_sums_are_rounded_once(target, rng):
    sums = rng.integers(-(2**22) + 1, 2**22, 10_000, np.int32)
    given = (10.0 ** rng.uniform(-20, 20, len(sums))).astype(np.float32)
    scales = np.asarray(without_last_bits(jnp.asarray(given.view(np.uint32)))).view(np.float32)
    assert (np.abs(scales / given.astype(np.float64) - 1) < 2.0**-21).all()
    assert (scales != given).any()
    with tracing_for(target):
        found = scaled(jnp.asarray(sums + np.int32(OFFSET_BITS)), jnp.asarray(scales))
    np.testing.assert_array_equal(found, (sums * scales.astype(np.float64)).astype(np.float32))

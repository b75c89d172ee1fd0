from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpjax.kernels.thresholds import reference
from tests.pallas_kernels.thresholds.by_sort import by_sort

SHAPE = (3, 17)  # one shape, so that all examples share a program
threshold = jax.jit(reference.threshold)
# Few different numbers, so that many tie.
NUMBERS = st.sampled_from([-np.inf, -7.5, -1e-45, -0.0, 0.0, 1e-45, 0.5, 2.0, 3e38]) | st.floats(
    width=32, allow_nan=False, allow_infinity=False
)


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(np.float32, SHAPE, elements=NUMBERS),
    arrays.arrays(np.int32, (3, 1), elements=st.integers(-1, 40)),
)
def test_the_wanted_number_is_that_of_a_sort(numbers, wanted):
    found = threshold(numbers, wanted, None)
    np.testing.assert_array_equal(found, by_sort(numbers, wanted))


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(np.float32, SHAPE, elements=NUMBERS),
    arrays.arrays(np.int32, SHAPE, elements=st.integers(0, 2**26)),
    arrays.arrays(np.int32, (3, 1), elements=st.integers(1, 2**30)),
)
def test_the_weights_above_are_those_of_a_sort(numbers, weights, wanted):
    found = threshold(numbers, wanted, weights)
    np.testing.assert_array_equal(found, by_sort(numbers, wanted, weights))


@pytest.mark.parametrize("wanted", [1, 2**31 - 1])
def test_sums_up_to_the_largest_whole_number_are_exact(wanted):
    numbers = jnp.asarray([[1.0, 2.0, 3.0]])
    weights = jnp.asarray([[2**30 - 1, 2**29, 2**29]], jnp.int32)
    found = threshold(numbers, jnp.full((1, 1), wanted, jnp.int32), weights)
    assert found.tolist() == [[3.0 if wanted == 1 else 1.0]]

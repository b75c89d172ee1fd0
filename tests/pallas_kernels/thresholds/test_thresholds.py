"""Thresholds of top-k and top-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpjax.kernels.thresholds import reference, triton
from mpjax.kernels.thresholds.api import threshold
from mpjax.kernels.thresholds.triton import MOST_PARTS, TILE, parts_of
from tests.pallas_kernels.thresholds.by_sort import by_sort

NUMBERS = jnp.asarray([[1.0, 4.0, 3.0, 2.0]] * 2)


def test_rows_that_want_nothing_or_too_much_have_no_threshold():
    assert threshold(NUMBERS, jnp.asarray([[0], [5]])).tolist() == [[-np.inf]] * 2


def test_rows_can_be_mapped():
    found = jax.vmap(threshold)(NUMBERS[:, None], jnp.asarray([1, 3]))
    assert found.ravel().tolist() == [4.0, 2.0]


@pytest.mark.usefixtures("pretend_gpu")
def test_a_gpu_runs_the_kernel_unless_devices_have_parts(lower_for_cuda):
    def find(numbers, **keywords):
        return threshold(numbers, jnp.int32(2), **keywords)

    assert "triton" in lower_for_cuda(find, NUMBERS)
    plain = lower_for_cuda(lambda x: find(x, implementation="reference"), NUMBERS)
    assert "triton" not in plain


@pytest.mark.parametrize(
    "arguments",
    [
        (NUMBERS.astype(jnp.bfloat16), jnp.int32(1)),
        (NUMBERS, jnp.float32(1)),
        (NUMBERS, jnp.int32(1), jnp.ones((2, 4))),
        (NUMBERS, jnp.int32(1), jnp.ones((2, 3), jnp.int32)),
        (NUMBERS[0], jnp.int32(1)),
    ],
)
def test_arrays_that_do_not_fit_are_errors(arguments):
    with pytest.raises(ValueError, match="expected float32, int32 and int32"):
        threshold(*arguments)


def test_no_rows_have_no_thresholds():
    for implementation in (None, "reference"):
        found = threshold(NUMBERS[:0], jnp.int32(1), implementation=implementation)
        assert found.shape == (0, 1)


SHAPE = (3, 17)  # one shape, so that all examples share a program
plain_threshold = jax.jit(reference.threshold)
# Few different numbers, so that many tie.
DRAWN = st.sampled_from([-np.inf, -7.5, -1e-45, -0.0, 0.0, 1e-45, 0.5, 2.0, 3e38]) | st.floats(
    width=32, allow_nan=False, allow_infinity=False
)


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(np.float32, SHAPE, elements=DRAWN),
    arrays.arrays(np.int32, (3, 1), elements=st.integers(-1, 40)),
)
def test_the_wanted_number_is_that_of_a_sort(numbers, wanted):
    found = plain_threshold(numbers, wanted, None)
    np.testing.assert_array_equal(found, by_sort(numbers, wanted))


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(np.float32, SHAPE, elements=DRAWN),
    arrays.arrays(np.int32, SHAPE, elements=st.integers(0, 2**26)),
    arrays.arrays(np.int32, (3, 1), elements=st.integers(1, 2**30)),
)
def test_the_weights_above_are_those_of_a_sort(numbers, weights, wanted):
    found = plain_threshold(numbers, wanted, weights)
    np.testing.assert_array_equal(found, by_sort(numbers, wanted, weights))


@pytest.mark.parametrize("wanted", [1, 2**31 - 1])
def test_sums_up_to_the_largest_whole_number_are_exact(wanted):
    numbers = jnp.asarray([[1.0, 2.0, 3.0]])
    weights = jnp.asarray([[2**30 - 1, 2**29, 2**29]], jnp.int32)
    found = plain_threshold(numbers, jnp.full((1, 1), wanted, jnp.int32), weights)
    assert found.tolist() == [[3.0 if wanted == 1 else 1.0]]


on_gpu = pytest.param(False, marks=pytest.mark.gpu)


def random_rows(rng, rows, size):
    """Numbers with ties, infinities and both zeros; weights; and what each row wants of both."""
    numbers = (3 * rng.standard_normal((rows, size))).astype(np.float32)
    numbers[0, ::3] = numbers[0, 0]
    numbers[-1, :4] = [-np.inf, 0.0, -0.0, np.inf]
    weights = rng.integers(0, 2**30 // size, (rows, size)).astype(np.int32)
    counts = rng.integers(1, size, (rows, 1)).astype(np.int32)
    return numbers, weights, counts, (rng.random((rows, 1)) * 2**29).astype(np.int32)


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(
    ("rows", "size"),
    [
        (3, 5 * TILE + 7),  # several programs for each row, of which the last is masked
    ],
)
def test_the_kernel_finds_the_numbers_of_a_sort(rows, size, interpret, rng):
    numbers, weights, counts, sums = random_rows(rng, rows, size)
    counts[rows // 2] = 0  # not searched
    for wanted, each in ((counts, None), (sums, weights)):
        found = triton.threshold(numbers, wanted, each, interpret=interpret)
        np.testing.assert_array_equal(found, by_sort(numbers, wanted, each))


@pytest.mark.parametrize("interpret", [True, on_gpu])
def test_rows_of_the_kernel_can_be_mapped(interpret, rng):
    numbers, _, counts, _ = random_rows(rng, 2, 700)

    def find(numbers, wanted):
        return triton.threshold(numbers, wanted, None, interpret=interpret)

    found = jax.vmap(find)(numbers[:, None], counts[:, None])
    np.testing.assert_array_equal(found[:, 0], by_sort(numbers, counts))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 256])
def test_on_the_gpu_rows_of_a_vocabulary_are_those_of_the_reference(rows, rng):
    numbers, weights, counts, sums = random_rows(rng, rows, 151_936)
    counts[0] = 50
    for wanted, each in ((counts, None), (sums, weights)):
        found = triton.threshold(numbers, wanted, each)
        np.testing.assert_array_equal(found, by_sort(numbers, wanted, each))


@pytest.mark.parametrize(
    ("rows", "size", "parts"),
    [
        (1, 151_936, MOST_PARTS),
        (64, 151_936, 16),
        (5000, 151_936, 1),
        (1, 1, 1),
        (0, 5, 1),
        (1, 3 * TILE, 2),  # a power of two
    ],
)
def test_rows_have_more_programs_the_fewer_they_are(rows, size, parts):
    assert parts_of(rows, size) == parts

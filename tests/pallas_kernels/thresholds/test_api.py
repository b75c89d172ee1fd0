from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.thresholds.api import threshold

NUMBERS = jnp.asarray([[1.0, 4.0, 3.0, 2.0]] * 2)


def test_each_row_may_want_another_number():
    assert threshold(NUMBERS, jnp.asarray([[1], [3]])).tolist() == [[4.0], [2.0]]


def test_one_number_is_for_all_rows():
    assert threshold(NUMBERS, jnp.int32(2)).tolist() == [[3.0], [3.0]]


def test_rows_that_want_nothing_or_too_much_have_no_threshold():
    assert threshold(NUMBERS, jnp.asarray([[0], [5]])).tolist() == [[-np.inf]] * 2


def test_weights_count_instead_of_numbers():
    weights = jnp.asarray([[10, 0, 5, 1]] * 2, jnp.int32)
    found = threshold(NUMBERS, jnp.asarray([[5], [6]]), weights)
    assert found.tolist() == [[3.0], [2.0]]


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


def test_a_wanted_number_for_another_count_of_rows_is_an_error():
    with pytest.raises(ValueError, match=r"wanted has shape \(3, 1\): expected \(2, 1\)"):
        threshold(NUMBERS, jnp.ones((3, 1), jnp.int32))


def test_no_rows_have_no_thresholds():
    for implementation in (None, "reference"):
        found = threshold(NUMBERS[:0], jnp.int32(1), implementation=implementation)
        assert found.shape == (0, 1)

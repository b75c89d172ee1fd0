from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.thresholds import triton
from mpjax.kernels.thresholds.triton import MOST_PARTS, TILE, parts_of
from tests.pallas_kernels.thresholds.by_sort import by_sort
from tests.sweeps import in_sweep

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
        in_sweep(1, 8 * TILE),
        in_sweep(2, 300),
        in_sweep(4, 151_936),
    ],
)
def test_the_kernel_finds_the_numbers_of_a_sort(rows, size, interpret, rng):
    numbers, weights, counts, sums = random_rows(rng, rows, size)
    counts[rows // 2] = 0  # not searched
    for wanted, each in ((counts, None), (sums, weights)):
        found = triton.threshold(numbers, wanted, each, interpret=interpret)
        np.testing.assert_array_equal(found, by_sort(numbers, wanted, each))


@pytest.mark.parametrize("interpret", [True, on_gpu])
def test_rows_can_be_mapped(interpret, rng):
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


def test_all_rounds_have_one_kernel(lower_for_cuda, pretend_gpu):
    def find(numbers, wanted):
        return triton.threshold(numbers, wanted, None)

    shapes = jax.ShapeDtypeStruct((2, 3000), jnp.float32), jax.ShapeDtypeStruct((2, 1), jnp.int32)
    text = lower_for_cuda(find, *shapes)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert text.count("call @_round") == 8

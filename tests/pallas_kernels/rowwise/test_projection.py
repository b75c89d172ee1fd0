from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import add_rms_norm
from mpjax.kernels.rowwise.projection import MOST_TOKENS, project_rms_norm, projected
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide
from tests.pallas_kernels.rowwise.rows import EPSILON, Rows

on_gpu = pytest.param(False, marks=pytest.mark.gpu)


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(
    ("tokens", "channels", "outputs", "residual"),
    [
        (1, 256, 130, True),  # more outputs than programs, which do not divide them
        (2, 300, 8, False),  # channels beyond the row are masked
    ],
)
def test_the_kernel_multiplies_its_norm(tokens, channels, outputs, residual, interpret, rng):
    """Stream and norm are those of `add_rms_norm`; products are those of the rounded norm."""
    rows = Rows.random(rng, (1, tokens, channels), "bfloat16", splits=3, residual=residual)
    matrix = random_array(rng, (outputs, channels), "bfloat16")
    run = functools.partial(projected, epsilon=EPSILON, dtype=jnp.dtype("bfloat16"))
    stream, normed, products = run(*rows.arrays, matrix, interpret=interpret)
    exact_stream, exact_normed = add_rms_norm(*rows.arrays, EPSILON, implementation="reference")
    np.testing.assert_array_equal(stream, exact_stream)
    assert relative_error(normed, wide(exact_normed)) < 1e-3  # a rounding may go the other way
    assert (products.shape, products.dtype) == ((1, tokens, outputs), jnp.float32)
    assert relative_error(products, wide(normed) @ wide(matrix).T) < 1e-5


def arguments(rng: np.random.Generator, tokens: int) -> tuple[jax.Array, ...]:
    rows = Rows.random(rng, (tokens, 1, 256), "bfloat16", splits=2, residual=True)
    residual = rows.arrays[1]
    assert residual is not None
    return rows.arrays[0], residual, rows.arrays[2], random_array(rng, (6, 256), "bfloat16")


def test_without_the_kernel_it_is_the_norm_and_a_product(rng):
    given = arguments(rng, 2)
    stream, normed, products = project_rms_norm(*given, epsilon=EPSILON)
    expected = add_rms_norm(*given[:3], EPSILON)
    np.testing.assert_array_equal(stream, expected[0])
    np.testing.assert_array_equal(normed, expected[1])
    assert relative_error(products, wide(normed) @ wide(given[3]).T) < GATES["bfloat16"]


def test_derivatives_are_those_of_the_norm_and_the_product(rng, interpreted_triton):
    given = arguments(rng, 1)

    def weighed(run):
        def total(*given):
            stream, normed, products = run(*given)
            return sum(x.astype(jnp.float32).sum() for x in (stream, normed, jnp.sin(products)))

        return jax.grad(total, (0, 1, 2, 3))(*given)

    def apart(terms, residual, weight, matrix):
        stream, normed = add_rms_norm(terms, residual, weight, EPSILON, implementation="reference")
        return stream, normed, normed.astype(jnp.float32) @ matrix.astype(jnp.float32).T

    run = functools.partial(project_rms_norm, epsilon=EPSILON)
    for found, exact in zip(weighed(run), weighed(apart), strict=True):
        assert relative_error(found, wide(exact)) < 2e-2


def test_few_tokens_take_one_kernel(lower_for_cuda, pretend_gpu):
    def lowered(tokens):
        shapes = (2, tokens, 2048), (tokens, 2048), (2048,), (128, 2048)
        dtypes = "float32", *["bfloat16"] * 3
        given = map(jax.ShapeDtypeStruct, shapes, dtypes)
        return lower_for_cuda(functools.partial(project_rms_norm, epsilon=1e-6), *given)

    few, many = lowered(MOST_TOKENS), lowered(MOST_TOKENS + 1)
    assert 'name = "project_rms_norm"' in few
    assert "dot_general" not in few
    assert 'name = "add_rms_norm"' in many
    assert "dot_general" in many

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.gradients import with_gradients_of

pytestmark = pytest.mark.any_version


def test_values_are_the_kernels_and_derivatives_the_references():
    def run(x, y):
        return with_gradients_of(lambda x, y: x * y, lambda x, y: jnp.float32(7.0), x, y)

    value, gradients = jax.value_and_grad(run, (0, 1))(jnp.float32(2.0), jnp.float32(3.0))
    assert value == 7.0
    assert gradients == (3.0, 2.0)


def test_arrays_in_a_tree_beside_integers_have_derivatives():
    def run(x: jax.Array, numbers: jax.Array, tree: dict[str, jax.Array]) -> jax.Array:
        return jnp.zeros_like(x)

    def reference(x: jax.Array, numbers: jax.Array, tree: dict[str, jax.Array]) -> jax.Array:
        return x[numbers] * tree["y"]

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return with_gradients_of(reference, run, x, jnp.array([1, 1]), {"y": y}).sum()

    x, y = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    assert loss(x, y) == 0
    slopes = jax.grad(loss, (0, 1))(x, y)
    np.testing.assert_array_equal(slopes[0], [0, 12])
    np.testing.assert_array_equal(slopes[1], [3, 3])


def test_terms_have_the_derivatives_of_their_sum():
    def split(x: jax.Array) -> jax.Array:
        return jnp.stack([x / 4, x / 2, x / 4]).astype(jnp.bfloat16)

    def loss(x: jax.Array) -> jax.Array:
        terms = with_gradients_of(lambda x: x**2, split, x)
        return (terms.sum(0) * jnp.bfloat16(2)).sum()

    slope = jax.grad(loss)(jnp.array([2.0, 3.0]))
    np.testing.assert_array_equal(slope, [8, 12])


def test_integers_among_the_results_have_none():
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.argsort(x), x**2

    def loss(x: jax.Array) -> jax.Array:
        order, squares = with_gradients_of(run, run, x)
        return squares[order[0]]

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([3.0, 2.0])), [0, 4])

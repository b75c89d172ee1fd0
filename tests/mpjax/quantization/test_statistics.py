from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.models.mlp import RoutedInputs
from mpjax.quantization.statistics import Statistics, squared_error


def make(rng, batch=3, tokens=10, channels=6):
    x = rng.standard_normal((batch, tokens, channels)).astype(np.float32)
    return x, rng.uniform(size=(batch, tokens)) < 0.7


def test_padding_does_not_count(rng):
    x, real = make(rng)
    found = Statistics.of(jnp.where(real[..., None], x, jnp.nan), real, 4)
    rows = x[real].astype(np.float64)
    assert found.tokens == len(rows)
    np.testing.assert_allclose(found.products, rows.T @ rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.magnitudes, np.abs(rows).sum(0), rtol=1e-5)
    np.testing.assert_allclose(found.hessian, rows.T @ rows / len(rows), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.largest_magnitude, np.abs(x[real]).max(0))
    assert found.samples.shape == (4, 6)
    assert all(
        any((sample == row).all() for row in x[real]) for sample in np.asarray(found.samples)
    )
    assert len(np.unique(found.samples, axis=0)) == 4


def test_sums_of_parts_are_those_of_the_whole(rng):
    x, real = make(rng, batch=4)
    whole = Statistics.of(x, real, 6)
    parts = Statistics.of(x[:1], real[:1], 3) + Statistics.of(x[1:], real[1:], 3)
    assert parts.samples.shape == whole.samples.shape
    for name in ("tokens", "products", "magnitudes", "largest", "smallest"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-5)


def test_division_is_of_the_inputs(rng):
    x, real = make(rng)
    scales = jnp.asarray(rng.uniform(0.5, 2, 6), jnp.float32)
    found, expected = (
        Statistics.of(x, real, 5) / scales,
        Statistics.of(x / scales[None, None], real, 5),
    )
    for leaves in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*leaves, rtol=1e-5)


def test_the_error_is_that_of_the_outputs(rng):
    x, real = make(rng)
    difference = rng.standard_normal((6, 3)).astype(np.float32)
    expected = ((x[real] @ difference) ** 2).mean(0)
    found = squared_error(jnp.asarray(difference), Statistics.of(x, real, 1).hessian)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_no_inputs_at_all():
    found = Statistics.of(jnp.ones((1, 4, 2)), jnp.zeros((1, 4), bool), 2)
    assert found.tokens == 0
    np.testing.assert_array_equal(found.hessian, jnp.zeros((2, 2)))


def test_experts_have_the_statistics_of_what_they_are_sent(rng):
    x = jnp.asarray(rng.standard_normal((2, 5, 4)), jnp.float32)
    rows = jnp.asarray(rng.standard_normal((2, 5, 2, 4)), jnp.float32)
    experts = jnp.asarray([[[0, 2], [2, 0], [2, 3], [0, 3], [3, 0]]] * 2)
    is_real = jnp.asarray([[True] * 5, [True, True, False, False, False]])
    for inputs in (x, rows):
        found = Statistics.of_experts(RoutedInputs(inputs, experts, 4), is_real, 3)
        for expert in range(4):
            mask = np.asarray((experts == expert) & is_real[..., None])
            own = np.asarray(rows)[mask] if inputs is rows else np.asarray(x)[mask.any(-1)]
            assert found.tokens[expert] == len(own)
            np.testing.assert_allclose(found.products[expert], own.T @ own, atol=1e-5)
        assert found.tokens[1] == 0
        twice = found + found
        assert twice.samples.shape == (4, 6, 4)
        np.testing.assert_array_equal(twice.tokens, 2 * found.tokens)

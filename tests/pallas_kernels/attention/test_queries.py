from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.attention import queries
from mpjax.kernels.attention.orientation import Orientation
from tests.pallas_kernels.oracles import NUMPY_DTYPES, wide

SHIFTS = [0, -2, -4]
FLOAT16 = jnp.dtype(jnp.float16)


def rows(rng: np.random.Generator, dtype: str) -> list[np.ndarray]:
    """Three parts of eight rows of sixteen channels; rows of all sizes, one of them of zeros."""
    sizes = np.array([1, 3e-4, 200, 0.7, 1e-2, 50, 1, 0])
    parts = rng.standard_normal((3, 8, 16)) * sizes[:, None]
    return list(parts.astype(NUMPY_DTYPES[dtype]))


def in_units(loaded: list[np.ndarray]) -> queries.Queries:
    """Queries in units of their rows."""
    largest = jnp.abs(jnp.asarray(np.stack(loaded)).astype(jnp.float32)).max((0, 2))
    parts = [jnp.asarray(q) for q in loaded]
    return queries.prepare(parts, SHIFTS, FLOAT16, largest=largest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_row_is_in_units_of_the_power_of_two_above_it(dtype, rng):
    loaded = rows(rng, dtype)
    found = in_units(loaded)
    assert found.unit is not None
    unit, largest = np.asarray(found.unit), np.abs(wide(np.stack(loaded))).max((0, 2))
    assert (np.frexp(unit)[0] == 0.5).all()
    assert (largest < unit).all()
    assert (largest >= unit / 2)[:-1].all()
    for part, q, shift in zip(found.parts, loaded, SHIFTS, strict=True):
        assert part.dtype == jnp.float16
        expected = wide(q) / unit[:, None]
        np.testing.assert_allclose(wide(part) * 2.0**-shift, expected, rtol=0, atol=2**-20)
    np.testing.assert_allclose(found.sum, wide(np.stack(loaded)).sum((0, 2)), rtol=1e-5, atol=1e-4)


def test_without_units_queries_keep_their_size(rng):
    loaded = rows(rng, "bfloat16")
    found = queries.prepare([jnp.asarray(q) for q in loaded], SHIFTS, jnp.dtype(jnp.bfloat16))
    assert found.unit is None
    for part, q, shift in zip(found.parts, loaded, SHIFTS, strict=True):
        np.testing.assert_array_equal(wide(part), wide(q) * 2.0**shift)


@pytest.mark.parametrize("few_rows", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_scores_of_codes(few_rows, exact, rng):
    """Both parts of a score against its float64; one term is right to a float16's rounding."""
    found = in_units(rows(rng, "float16"))
    parameters = rng.uniform(0.5, 8, (3, 2, 16)).astype(np.float16)
    parameters[:, 1] *= -30
    products, left = queries.times_channels(
        found,
        [(jnp.asarray(step), jnp.asarray(zero)) for step, zero in parameters],
        SHIFTS,
        Orientation(few_rows=few_rows),
        midpoint=None if exact else 7.5,
    )
    codes = rng.integers(0, 16, (3, 100, 16))
    scores, expected = np.asarray(left)[:, None].astype(np.float64), np.zeros((8, 1))
    for terms, q, (step, zero), code, shift in zip(
        products, found.parts, parameters, codes, SHIFTS, strict=True
    ):
        assert len(terms) == 1 + exact
        scores = scores + sum(wide(x) for x in terms) @ code.T * 2.0**-shift
        expected = expected + wide(q) @ (code * wide(step) + wide(zero)).T * 2.0**-shift
    error = np.abs(scores - expected)
    assert error.max() < (0.03 if exact else 0.3)  # XLA's sums of float16 are rough on the CPU
    assert np.abs(expected).max() > 100


@pytest.mark.parametrize(("step", "zero"), [(131008 / 3, -65504), (1, 65504)])
@pytest.mark.parametrize("midpoint", [1.5, None])
def test_the_largest_products_are_finite(step, zero, midpoint):
    large = jnp.full((8, 16), jnp.finfo(jnp.bfloat16).max / 4, jnp.bfloat16)
    largest = large.astype(jnp.float32).max(1)
    found = queries.prepare([large], [0], FLOAT16, largest=largest)
    parameters = jnp.full(16, step, jnp.float16), jnp.full(16, zero, jnp.float16)
    [products], left = queries.times_channels(
        *(found, [parameters], [0], Orientation(few_rows=True)), midpoint=midpoint
    )
    assert all(np.isfinite(wide(product)).all() for product in products)
    assert np.isfinite(np.asarray(left)).all()

from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.kernels import WeightFormat, grid
from mpjax.quantization.clipping import learn_ranges
from mpjax.quantization.ranges import search_ranges
from mpjax.quantization.statistics import squared_error


@pytest.mark.parametrize("text", ["uint4:g32", "uint4:g64:sym", "table3:g32", "liquid4:g64/int8"])
def test_it_is_better_than_the_whole_range(rng, text):
    format = WeightFormat.parse(text)
    x = rng.standard_normal((256, 64)) @ rng.standard_normal((64, 64))
    hessian = jnp.asarray(x.T @ x / len(x), jnp.float32)
    weight = jnp.asarray(rng.standard_t(3, (64, 16)), jnp.float32)

    def error(fitted):
        return float(squared_error(fitted.round(weight).dequantize() - weight, hessian).sum())

    found = error(learn_ranges(weight, hessian, format, steps=60, rate=0.05))
    whole = error(grid.fit(weight, format))
    assert found <= whole
    if not format.codes.startswith("liquid"):  # whose steps are integers
        assert found < 0.97 * whole
        assert found < 1.1 * error(search_ranges(weight, jnp.diagonal(hessian), format))


def test_more_steps_are_never_worse(rng):
    """Though they overshoot at this rate, so that many are worse than one before them."""
    format = WeightFormat.parse("uint4:g32")
    x = rng.standard_normal((64, 32)) @ rng.standard_normal((32, 32))
    hessian = jnp.asarray(x.T @ x / len(x), jnp.float32)
    weight = jnp.asarray(rng.standard_t(3, (32, 8)), jnp.float32)
    errors = []
    for steps in (4, 8, 16):
        rounded = learn_ranges(weight, hessian, format, steps=steps, rate=0.3).round(weight)
        errors.append(float(squared_error(rounded.dequantize() - weight, hessian).sum()))
    assert errors[0] > errors[1] >= errors[2]

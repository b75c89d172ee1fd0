from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, grid
from mpjax.quantization.ranges import search_ranges

FORMATS = (
    *("uint4:g32", "uint4:g64:sym", "uint8:gK", "table4:g32", "table2:g64"),
    *("float8:gK", "float8:g128", "int8/int8", "liquid4:g64/int8"),
)


def errors_of(weight, plain, hessian):
    """The error of each output channel, between inputs of one group alone, in float64."""
    size = plain.format.group_size or len(weight)
    difference = np.asarray(plain.dequantize() - weight, np.float64)
    total = np.zeros(weight.shape[1])
    for begin in range(0, len(weight), size):
        part = slice(begin, begin + size)
        total += np.einsum("in,ij,jn->n", difference[part], hessian[part, part], difference[part])
    return total


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("is_square", [True, False])
def test_no_output_channel_loses(rng, text, is_square):
    format = WeightFormat.parse(text)
    x = rng.standard_normal((256, 128)) * np.exp(rng.standard_normal(128))
    hessian = x.T @ x / len(x) if is_square else np.diag((x**2).mean(0))
    weight = jnp.asarray(rng.standard_t(3, (128, 32)), jnp.float32)
    importance = jnp.asarray(hessian if is_square else np.diag(hessian), jnp.float32)
    found = errors_of(weight, search_ranges(weight, importance, format).round(weight), hessian)
    nearest = errors_of(weight, grid.fit(weight, format).round(weight), hessian)
    if text == "float8:g128":  # one block of all outputs
        assert found.sum() <= nearest.sum() * (1 + 1e-5)
    else:
        assert (found <= nearest * (1 + 1e-5)).all()
    if format.bits == 4 or text == "table2:g64":
        assert found.sum() < 0.9 * nearest.sum()


def test_the_share_is_the_best_of_those_tried(rng):
    """For one group, the grid has the least error of all that are fitted to a cut weight."""
    format = WeightFormat.parse("uint4:g32")
    weight = jnp.asarray(rng.standard_t(2, (32, 4)), jnp.float32)
    importance = np.exp(rng.standard_normal(32))
    ratios = (1.0, 0.8, 0.6, 0.4)
    found = search_ranges(weight, jnp.asarray(importance, jnp.float32), format, ratios=ratios)
    tried = []
    for ratio in ratios:
        low, high = np.minimum(weight.min(0), 0) * ratio, np.maximum(weight.max(0), 0) * ratio
        fitted = grid.fit(jnp.clip(weight, low[None], high[None]), format)
        tried.append(errors_of(weight, fitted.round(weight), np.diag(importance)))
    best = np.min(tried, axis=0)
    np.testing.assert_allclose(
        errors_of(weight, found.round(weight), np.diag(importance)), best, rtol=1e-4
    )


def test_a_table_may_be_given(rng):
    format, table = WeightFormat.parse("table2:g32"), jnp.asarray([-1.0, -0.2, 0.3, 1.0])
    weight = jnp.asarray(rng.standard_normal((64, 4)), jnp.float32)
    found = search_ranges(weight, jnp.ones(64), format, table=table)
    np.testing.assert_array_equal(found.parameters.table, table)

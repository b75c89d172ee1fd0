from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_cache import hadamard
from pallas_kernels.kv_cache.triton import lanes, targets
from tests.pallas_kernels import oracles
from tests.pallas_kernels.kv_cache.pages import vectors
from tests.pallas_kernels.oracles import wide

each_dim = pytest.mark.parametrize("dim", [64, 96, 128, 256])


@each_dim
def test_it_is_orthogonal_and_its_own_inverse(dim):
    matrix = wide(hadamard.transform(jnp.eye(dim)))
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert np.unique(np.count_nonzero(matrix, axis=0)) == hadamard.order(dim) == dim & -dim


@each_dim
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pieces_bit_for_bit_and_the_product_nearly(dim, dtype, rng):
    """One piece as it is, and several at their lanes, of which some hold a channel again."""
    x = vectors(rng, (50, dim), dtype)
    expected = oracles.hadamard(x)
    found = hadamard.transform(jnp.asarray(x))
    assert found.dtype == dtype
    size = np.abs(wide(x)).max(-1, keepdims=True)
    assert (np.abs(wide(found) - wide(expected)) <= size * 2.0**-6).all()

    for count in (1, 4) if dtype == "float16" else (2, 8):
        width = dim // count
        pieces = [jnp.asarray(x)[:, i * width + lanes(width)] for i in range(count)]
        if count == 1:
            pieces = [jnp.asarray(x)]
        parts = jax.jit(hadamard.transform_pieces, static_argnums=(1, 2))(pieces, dim, dtype)
        target, is_first = targets(width) if count > 1 else (np.arange(dim), np.ones(dim, bool))
        assert len(set(np.asarray(target).tolist())) == len(target)
        for i, part in enumerate(parts):
            slot = np.asarray(target)[np.asarray(is_first)]
            whole = np.empty((len(x), width))
            whole[:, slot] = wide(part)[:, np.asarray(is_first)]
            np.testing.assert_array_equal(whole, wide(expected)[:, i * width : (i + 1) * width])


def test_a_large_channel_is_spread():
    x = np.zeros((1, 64), np.float32)
    x[0, 5] = 80
    np.testing.assert_allclose(np.abs(hadamard.transform(jnp.asarray(x))), 10, rtol=1e-6)

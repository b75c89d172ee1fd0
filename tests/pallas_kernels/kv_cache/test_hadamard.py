from __future__ import annotations

import jax
import numpy as np
import pytest

from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache.writing import lanes, targets
from tests.pallas_kernels import oracles
from tests.pallas_kernels.kv_cache.pages import vectors
from tests.pallas_kernels.oracles import wide

transform = jax.jit(hadamard.transform)
transform_pieces = jax.jit(hadamard.transform_pieces, static_argnums=(1, 2))
each_dim = pytest.mark.parametrize("dim", [64, 96, 128, 256])


@each_dim
def test_it_is_orthogonal_and_its_own_inverse(dim):
    matrix = wide(transform(np.eye(dim, dtype=np.float32)))
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert np.unique(np.count_nonzero(matrix, axis=0)) == hadamard.order(dim) == dim & -dim


@pytest.mark.parametrize(
    ("dim", "dtype", "counts"),
    [
        (64, "bfloat16", (2, 8)),
        (96, "float16", (1, 4)),
        (96, "bfloat16", (2, 8)),
        (128, "float16", (1, 4)),
        (256, "bfloat16", (8,)),
    ],
)
def test_pieces_bit_for_bit_and_the_product_nearly(dim, dtype, counts, rng):
    """One piece as it is, and several at their lanes, of which some hold a channel again."""
    x = vectors(rng, (50, dim), dtype)
    expected = oracles.hadamard(x)
    found = transform(x)
    assert found.dtype == dtype
    size = np.abs(wide(x)).max(-1, keepdims=True)
    assert (np.abs(wide(found) - wide(expected)) <= size * 2.0**-6).all()

    for count in counts:
        width = dim // count
        pieces = [x[:, i * width + np.asarray(lanes(width))] for i in range(count)]
        if count == 1:
            pieces = [x]
        parts = transform_pieces(pieces, dim, dtype)
        target, is_first = np.arange(dim), np.ones(dim, bool)
        if count > 1:
            target, is_first = (np.asarray(part) for part in targets(width))
        assert len(set(target.tolist())) == len(target)
        for i, part in enumerate(parts):
            whole = np.empty((len(x), width))
            whole[:, target[is_first]] = wide(part)[:, is_first]
            np.testing.assert_array_equal(whole, wide(expected)[:, i * width : (i + 1) * width])


def test_a_large_channel_is_spread():
    x = np.zeros((1, 64), np.float32)
    x[0, 5] = 80
    np.testing.assert_allclose(np.abs(transform(x)), 10, rtol=1e-6)

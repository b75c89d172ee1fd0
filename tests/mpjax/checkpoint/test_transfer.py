from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint import transfer
from mpjax.checkpoint.transfer import put_pieces, to_device


@pytest.mark.parametrize("shape", [(10, 3), (1, 7), (5,)])
def test_pieces_make_the_array(shape, rng):
    array = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    for size in (1, 4 * array.nbytes // shape[0], 2 * array.nbytes):
        found = put_pieces(array, size)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, array)


def test_on_a_cpu_the_memory_is_not_shared():
    array = np.arange(6.0, dtype=np.float32)
    found = to_device(array)
    array[:] = 0
    np.testing.assert_array_equal(found, np.arange(6.0, dtype=np.float32))


@pytest.mark.gpu
def test_large_arrays_come_in_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 16)
    array = np.arange(20, dtype=np.float32).reshape(10, 2)
    np.testing.assert_array_equal(to_device(array), array)

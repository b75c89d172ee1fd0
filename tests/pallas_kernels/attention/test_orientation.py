from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.attention.orientation import Orientation

SLOTS, ROWS, CHANNELS = 6, 4, 5


@pytest.mark.parametrize("few_rows", [True, False])
def test_tiles_of_both_orientations_are_the_same_numbers(few_rows, rng):
    """Attention's two products with what slots and rows have between them, against numpy."""
    # Small enough for a GPU, which rounds operands of float32 products to eleven bits.
    keys, values = (rng.integers(-2, 3, (SLOTS, CHANNELS)).astype(np.float32) for _ in range(2))
    queries = rng.integers(-2, 3, (ROWS, CHANNELS)).astype(np.float32)
    of_slots, of_rows = np.arange(SLOTS, dtype=np.float32), np.arange(ROWS, dtype=np.float32)
    oriented = Orientation(few_rows)
    scores = oriented.times_queries(jnp.asarray(keys), jnp.asarray(queries))
    assert scores.shape == oriented.shape(SLOTS, ROWS)
    assert (scores.shape[oriented.slots], scores.shape[oriented.rows]) == (SLOTS, ROWS)
    scores *= oriented.for_slots(jnp.asarray(of_slots))
    scores += oriented.for_rows(jnp.asarray(of_rows))
    sums = oriented.times_values(scores, jnp.asarray(values.T if few_rows else values))
    assert sums.shape == oriented.shape(CHANNELS, ROWS)
    expected = (queries @ keys.T * of_slots + of_rows[:, None]) @ values  # [rows, channels]
    np.testing.assert_array_equal(sums.T if few_rows else sums, expected)

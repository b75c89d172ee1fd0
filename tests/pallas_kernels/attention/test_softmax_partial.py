from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.attention import rows, tiles
from mpjax.kernels.attention.combine import FLOOR
from mpjax.kernels.attention.orientation import Orientation
from mpjax.kernels.attention.softmax_partial import SoftmaxPartial
from mpjax.kernels.launch import Settings, first_program_id, launch

TOKENS, HEADS, DIM, PROGRAMS = 4, 2, 24, 3
ROWS = 8


@pytest.mark.parametrize("few_rows", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_means_and_totals_go_to_the_place_of_their_rows(few_rows, shift, rng):
    """Two tokens, five of eight rows, the first without a key; other places are kept."""
    sums = rng.standard_normal((ROWS, 32)).astype(np.float32)
    total = rng.uniform(1, 5, ROWS).astype(np.float32)
    base = rng.uniform(-9, 9, ROWS).astype(np.float32)
    sums[0], total[0], base[0] = 0, 0, FLOOR
    shape = (TOKENS, HEADS, PROGRAMS, DIM)

    def kernel(references: Any, _: Any, *found: Any) -> None:
        sums_ref, total_ref, base_ref = references
        number = first_program_id() + jnp.arange(ROWS)
        of_rows = rows.Rows(number // HEADS, number % HEADS, number, number < 5, jnp.int32(5))
        parts = [tiles.Part(words, range(1)) for words in tiles.cover(DIM)]
        lanes = [part.words.lanes for part in parts]
        tile = [sums_ref[jnp.arange(ROWS)[:, None], lane[None, :]] for lane in lanes]
        result = SoftmaxPartial(
            tuple(x.T if few_rows else x for x in tile),
            total_ref[...],
            base_ref[...],
            parts,
            of_rows,
            Orientation(few_rows=few_rows),
        )
        result.store(*found, 1, shift)

    before = jnp.full(shape, 7.0), jnp.full(shape[:3], 7.0)
    outputs, log2_totals = launch(
        kernel,
        (jnp.asarray(sums), jnp.asarray(total), jnp.asarray(base)),
        before,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in before),
        grid=(1,),
        settings=Settings("store"),
        aliases={3: 0, 4: 1},
        interpret=True,
    )
    expected, expected_totals = (np.array(x) for x in before)
    for row in range(5):
        place = row // HEADS + shift, row % HEADS, 1
        expected[place] = 0 if row == 0 else sums[row, :DIM] / total[row]
        expected_totals[place] = FLOOR if row == 0 else base[row] + np.log2(total[row])
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    np.testing.assert_allclose(log2_totals, expected_totals, rtol=1e-5)

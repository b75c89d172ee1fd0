from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import combine as combine_module
from pallas_kernels.attention.combine import FLOOR, combine


@pytest.mark.parametrize("programs", [1, 1024])
@pytest.mark.parametrize(("splits", "dim"), [(3, 64), (5, 96), (70, 96)])
def test_parts_count_by_their_weights(splits, dim, programs, rng, monkeypatch):
    """Of 70, a program reads 32 channels; of a few, four heads if there must be few programs."""
    monkeypatch.setattr(combine_module, "ENOUGH_PROGRAMS", programs)
    outputs = rng.standard_normal((3, 2, splits, dim)).astype(np.float32)
    sums = rng.uniform(-200, 200, (3, 2, splits)).astype(np.float32)
    sums[1, 1] = rng.uniform(-1, 1, splits)
    sums[2, :, 1:] = FLOOR
    outputs[0] = 0
    sums[0] = FLOOR  # no part saw a key
    weights = np.exp2(sums.astype(np.float64) - sums.max(-1, keepdims=True))
    expected = (outputs * weights[..., None]).sum(2) / weights.sum(-1)[..., None]
    found = combine(jnp.asarray(outputs), jnp.asarray(sums), jnp.dtype("float32"), interpret=True)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)

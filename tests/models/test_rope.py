from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.models.config import RopeScaling
from mpjax.models.rope import yarn, yarn_attention_factor
from mpjax.models.rotary import scaled_frequencies

# gpt-oss: fractional bounds.
SCALING = RopeScaling("yarn", 32.0, original_context=4096, whole_channels=False)


def expected(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Section 3.2 of YaRN by wavelengths, with a ramp over the numbers of the pairs."""
    pairs = np.arange(dim // 2)
    plain = theta ** (-2 * pairs / dim)
    bounds = []
    for turns in (scaling.fast_turns, scaling.slow_turns):
        frequency = 2 * np.pi * turns / scaling.original_context
        bounds.append(-np.log(frequency) / np.log(theta) * dim / 2)
    low, high = bounds
    if scaling.whole_channels:
        low, high = np.floor(low), np.ceil(high)
    kept = 1 - np.clip((pairs - low) / (high - low), 0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


@pytest.mark.parametrize("whole", [False, True])
def test_frequencies(whole):
    scaling = RopeScaling("yarn", 32.0, original_context=4096, whole_channels=whole)
    plain = 150000.0 ** (-jnp.arange(0, 64, 2, dtype=jnp.float32) / 64)
    found = yarn(plain, 150000.0, scaling)
    np.testing.assert_allclose(found, expected(64, 150000.0, scaling), rtol=1e-5)
    np.testing.assert_array_equal(found, scaled_frequencies(64, 150000.0, scaling))
    assert found[0] == 1
    np.testing.assert_allclose(found[-1] * 32, plain[-1], rtol=1e-6)


def test_bounds_that_are_rounded_differ():
    whole = RopeScaling("yarn", 32.0, original_context=4096)
    found = [scaled_frequencies(64, 150000.0, scaling) for scaling in (SCALING, whole)]
    assert np.abs(found[0] / found[1] - 1).max() > 0.01


def test_the_attention_factor():
    assert yarn_attention_factor(32.0) == pytest.approx(1.3466, abs=1e-4)
    assert yarn_attention_factor(1.0) == 1.0

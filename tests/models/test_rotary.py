"""Frequencies of the rotary embedding, and heads of which a part is rotated.

All kinds of scaling are compared with transformers' in tests/mpjax/checkpoint.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import rotate
from mpjax.models import RopeScaling
from mpjax.models.rotary import (
    attention_factor,
    channel_order,
    frequencies,
    scaled_frequencies,
    turn,
    yarn_attention_factor,
)
from tests.models.small import CONFIG
from tests.pallas_kernels.oracles import random_array, wide


def test_rotation_turns_pairs_as_complex_numbers(rng):
    x = random_array(rng, (2, 5, 3, 8), "float32")
    angles = rng.uniform(-10, 10, (2, 5, 4)).astype(np.float32)
    turned = wide(rotate(x, *turn(jnp.asarray(angles), 8)))
    pairs = (wide(x)[..., :4] + 1j * wide(x)[..., 4:]) * np.exp(1j * angles[:, :, None])
    np.testing.assert_allclose(turned, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-5)


def test_scores_depend_on_distance_alone(rng):
    query, key = random_array(rng, (2, 1, 1, 1, 64), "float32")
    frequencies = scaled_frequencies(64, 10000.0, None)

    def score(at: int, other: int) -> float:
        turned = (
            rotate(query, *turn(at * frequencies[None, None], 64)),
            rotate(key, *turn(other * frequencies[None, None], 64)),
        )
        return float(jnp.vdot(*turned))

    assert score(17, 5) == pytest.approx(score(112, 100), abs=1e-3)
    assert score(17, 5) != pytest.approx(score(18, 5), abs=1e-2)


def test_rotation_keeps_sixteen_bits_in_and_out(rng):
    x = random_array(rng, (1, 3, 2, 8), "bfloat16")
    turned = rotate(x, *turn(jnp.zeros((1, 3, 4)), 8))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide(turned), wide(x))


def test_plain_frequencies():
    expected = [500000.0 ** (-2 * i / 128) for i in range(64)]
    np.testing.assert_allclose(scaled_frequencies(128, 500000.0, None), expected, rtol=1e-5)


def test_linear_scaling_divides_all_frequencies():
    scaled = scaled_frequencies(64, 10000.0, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(scaled, scaled_frequencies(64, 10000.0, None) / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("factor", "low", "high", "context"), [(8, 1, 4, 8192), (32, 1, 4, 8192), (4, 2, 8, 1000)]
)
def test_llama3_scaling(factor, low, high, context):
    """Wavelength by wavelength, as the model's authors describe it."""
    expected = []
    for frequency in (500000.0 ** (-2 * i / 128) for i in range(64)):
        wavelength = 2 * np.pi / frequency
        if wavelength < context / high:
            expected.append(frequency)
        elif wavelength > context / low:
            expected.append(frequency / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    scaling = RopeScaling("llama3", factor, low, high, context)
    scaled = scaled_frequencies(128, 500000.0, scaling)
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)
    changed = np.asarray(scaled) / np.asarray(scaled_frequencies(128, 500000.0, None))
    assert ((changed > 1 / factor * 1.01) & (changed < 0.99)).any(), "nothing was blended"


def test_kinds_of_layers():
    scaling = RopeScaling("yarn", 4.0, attention_factor=1.5)
    config = dataclasses.replace(
        CONFIG, rope_theta=1e6, local_rope_theta=1e4, rope_scaling=scaling, rotary_dim=8
    )
    plain = scaled_frequencies(8, 1e4, None)
    np.testing.assert_array_equal(frequencies(config, "local")[:4], plain)
    np.testing.assert_array_equal(frequencies(config, "local")[4:], 0)
    np.testing.assert_array_equal(frequencies(config, "none"), np.zeros(8))
    np.testing.assert_array_equal(frequencies(config)[:4], scaled_frequencies(8, 1e6, scaling))
    assert [attention_factor(config, rope) for rope in ("global", "local")] == [1.5, 1.0]
    local = RopeScaling("longrope", 2.0, 1, 4, 8, 1.2, short_factors=[2] * 4, long_factors=[3] * 4)
    config = dataclasses.replace(config, local_rope_scaling=local)
    np.testing.assert_allclose(frequencies(config, "local")[:4], plain / 2)
    factors = [attention_factor(config, rope) for rope in ("global", "local", "none")]
    assert factors == [1.5, 1.2, 1.0]
    cosines, sines = turn(jnp.zeros((2, 8)), 8, 1.5)
    np.testing.assert_array_equal(cosines, [[1.5] * 4 + [1] * 4] * 2)
    np.testing.assert_array_equal(sines, 0)


def test_scalings_that_depend_on_the_length_of_sequences():
    longrope = RopeScaling(
        "longrope", 4.0, original_context=64, short_factors=(1, 2), long_factors=(3, 4)
    )
    plain = scaled_frequencies(4, 1e4, None)
    for length, factors in ((64, [1, 2]), (65, [3, 4])):
        found = scaled_frequencies(4, 1e4, longrope, length)
        np.testing.assert_allclose(found, plain / np.array(factors, np.float32), rtol=1e-6)
        both = scaled_frequencies(4, 1e4, longrope, jnp.array([[length], [0]]))
        np.testing.assert_array_equal(both[:, 0], [found, scaled_frequencies(4, 1e4, longrope)])
    dynamic = RopeScaling("dynamic", 2.0, original_context=64)
    np.testing.assert_allclose(scaled_frequencies(4, 1e4, dynamic, 64), plain, rtol=1e-6)
    grown = 1e4 * 3**2  # factor · 128 / 64 − (factor − 1), to the power dim / (dim − 2)
    found = scaled_frequencies(4, 1e4, dynamic, 128)
    np.testing.assert_allclose(found, scaled_frequencies(4, grown, None), rtol=1e-6)
    both = scaled_frequencies(4, 1e4, dynamic, jnp.array([[128], [0]]))
    np.testing.assert_allclose(both[:, 0], [found, plain], rtol=1e-6)
    with pytest.raises(ValueError, match="kind is 'other': expected one of"):
        scaled_frequencies(4, 1e4, RopeScaling("other", 2.0))


def test_a_part_of_a_head_is_rotated(rng):
    """Pairs lie half of the rotated channels apart, and the rest keeps its numbers."""
    x = random_array(rng, (1, 1, 1, 12), "float32")
    angles, order = rng.uniform(-3, 3, 4).astype(np.float32), channel_order(8, 12)
    padded = jnp.asarray(np.concatenate([angles, [0, 0]]).astype(np.float32))[None, None]
    found = np.asarray(rotate(x[..., order], *turn(padded, 8)))[0, 0, 0]
    given = wide(x)[0, 0, 0]
    pairs = (given[:4] + 1j * given[4:8]) * np.exp(1j * angles)
    expected = np.concatenate([pairs.real, pairs.imag, given[8:]])
    np.testing.assert_allclose(found, expected[order], atol=1e-6)
    assert channel_order(12, 12) is None


# gpt-oss: fractional bounds.
YARN = RopeScaling("yarn", 32.0, original_context=4096, whole_channels=False)


def yarn_by_wavelengths(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
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
def test_frequencies_of_yarn(whole):
    scaling = RopeScaling("yarn", 32.0, original_context=4096, whole_channels=whole)
    plain = 150000.0 ** (-jnp.arange(0, 64, 2, dtype=jnp.float32) / 64)
    found = scaled_frequencies(64, 150000.0, scaling)
    np.testing.assert_allclose(found, yarn_by_wavelengths(64, 150000.0, scaling), rtol=1e-5)
    assert found[0] == 1
    np.testing.assert_allclose(found[-1] * 32, plain[-1], rtol=1e-6)


def test_bounds_of_yarn_that_are_rounded_differ():
    whole = RopeScaling("yarn", 32.0, original_context=4096)
    found = [scaled_frequencies(64, 150000.0, scaling) for scaling in (YARN, whole)]
    assert np.abs(found[0] / found[1] - 1).max() > 0.01


def test_the_attention_factor_of_yarn():
    assert yarn_attention_factor(32.0) == pytest.approx(1.3466, abs=1e-4)
    assert yarn_attention_factor(1.0) == 1.0

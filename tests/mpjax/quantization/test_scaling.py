from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, grid, quantize_activations
from mpjax.models.maps import Fold
from mpjax.models.mlp import RoutedInputs
from mpjax.quantization.scaling import (
    ALPHAS,
    AWQ_STEPS,
    Reader,
    awq_scales,
    best_scales,
    deployed_error,
    of_each_expert,
    smooth_scales,
    threshold_scales,
)
from mpjax.quantization.statistics import Statistics

INT8 = ("liquid4:g64/int8", "float8:gK/float8")


@pytest.fixture
def weight(rng):
    return jnp.asarray(rng.standard_normal((128, 24)), jnp.float32)


@pytest.fixture
def inputs(rng):
    """Inputs with two channels that are far larger than the others."""
    x = rng.standard_normal((256, 128)).astype(np.float32)
    x[:, 5] *= 30
    x[:, 77] *= 60
    return x


@pytest.fixture
def statistics(inputs):
    return Statistics.of(jnp.asarray(inputs)[None], jnp.ones((1, 256), bool), 128)


def output_error(x, weight, scales, format):
    """The mean squared error of x · W in float64, computed from the definition."""
    scaled = weight * scales[:, None]
    rounded = np.asarray(grid.fit(scaled, format).round(scaled).dequantize(), np.float64)
    read = x / np.asarray(scales)[None]
    if format.operand is not None:
        read = np.asarray(quantize_activations(jnp.asarray(read), format).dequantize())
    return ((read @ rounded - x @ np.asarray(weight, np.float64)) ** 2).sum(1).mean()


def test_the_error_is_a_sum_over_all_inputs(rng):
    """So an expert counts by the inputs that it has read; those without any don't."""
    x = jnp.asarray(rng.standard_normal((1, 8, 32)), jnp.float32)
    routed = RoutedInputs(x, jnp.asarray([0, 0, 2, 0, 2, 0, 0, 0])[None, :, None], 3)
    statistics = Statistics.of_experts(routed, jnp.ones((1, 8), bool), 4)
    losses = jnp.broadcast_to(jnp.asarray([2.0, 3.0, 5.0])[:, None, None], (3, 32, 4))
    reader = Reader(losses, statistics, WeightFormat.parse("uint4:g32"))
    found = reader.error(lambda weight, *_: weight[0, 0], jnp.ones(32))
    assert float(found) == 6 * 2 + 2 * 5


def test_awq_takes_the_least_of_its_grid(weight, inputs, statistics):
    format = WeightFormat.parse("uint4:g32")
    found = awq_scales(Reader(weight, statistics, format))
    mean = np.abs(inputs).mean(0)
    shares = np.abs(weight).reshape(4, 32, -1)
    shares = (shares / (shares.max(1, keepdims=True) + 1e-6)).reshape(128, -1).mean(1)
    candidates = [np.ones(128, np.float32)]
    for power in np.linspace(0, 1, AWQ_STEPS + 1, dtype=np.float32):
        candidates += [mean**power, mean**power / (shares ** (1 - power) + 1e-4)]
    centred = [c / np.sqrt(c.max() * c.min()) for c in candidates]
    losses = [output_error(inputs, weight, jnp.asarray(c), format) for c in centred]
    assert output_error(inputs, weight, found, format) == pytest.approx(min(losses), rel=1e-3)
    assert min(losses) < 0.8 * losses[0]
    np.testing.assert_allclose(found, centred[int(np.argmin(losses))], rtol=1e-4)


@pytest.mark.parametrize("text", INT8)
def test_smoothing_takes_the_best_alpha(weight, inputs, statistics, text):
    format = WeightFormat.parse(text)
    found = smooth_scales(Reader(weight, statistics, format))
    ones = deployed_error(weight, statistics, format, jnp.ones(128))
    assert deployed_error(weight, statistics, format, found) < 0.5 * ones
    largest, weights = np.abs(inputs).max(0), np.abs(weight).max(1)
    for alpha in ALPHAS:
        scales = jnp.asarray(largest**alpha / weights ** (1 - alpha))
        scales /= jnp.sqrt(scales.max() * scales.min())
        loss = deployed_error(weight, statistics, format, scales)
        assert deployed_error(weight, statistics, format, found) <= loss * (1 + 1e-5)


@pytest.mark.parametrize("text", INT8)
def test_a_threshold_scales_what_is_beyond_it(weight, inputs, statistics, text):
    format = WeightFormat.parse(text)
    found = np.asarray(threshold_scales(Reader(weight, statistics, format)))
    assert found[77] > found[5] > 1
    assert (found >= 1).all()
    scaled = np.abs(inputs).max(0)[found > 1] / found[found > 1]
    np.testing.assert_allclose(scaled, scaled[0], rtol=1e-5)  # all of them to the threshold
    ones = deployed_error(weight, statistics, format, jnp.ones(128))
    if text != "float8:gK/float8":  # floating point hardly minds outliers
        assert deployed_error(weight, statistics, format, jnp.asarray(found)) < 0.5 * ones


def test_the_deployed_error_is_of_rounded_operands(weight, inputs, statistics):
    samples = np.asarray(statistics.samples)
    scales = jnp.asarray(np.abs(inputs).max(0) ** 0.5)
    for text in ("int8/int8", "liquid4:g64/int8"):
        format = WeightFormat.parse(text)
        expected = output_error(samples, weight, scales, format)
        found = deployed_error(weight, statistics, format, scales)
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def stacked(rng, inputs):
    """Two experts, of which the second has no inputs: statistics and a reader of them."""
    weight = jnp.asarray(rng.standard_normal((2, 128, 24)), jnp.float32)
    routed = RoutedInputs(jnp.asarray(inputs)[None], jnp.zeros((1, 256, 1), jnp.int32), 2)
    found = Statistics.of_experts(routed, jnp.ones((1, 256), bool), 128)
    return Reader(weight, found, WeightFormat.parse("uint4:g32"))


@pytest.mark.parametrize("scaling", [awq_scales, smooth_scales, threshold_scales])
def test_experts_share_scales_by_the_errors_of_all(stacked, statistics, scaling):
    """Only the expert that has inputs counts, but weights of all make AWQ's candidates."""
    found = scaling(stacked)
    assert found.shape == (128,)

    def error(scales):
        return deployed_error(stacked.weight[0], statistics, stacked.format, scales)

    assert error(found) <= error(jnp.ones(128))
    if scaling is awq_scales:
        assert error(found) < 0.8 * error(jnp.ones(128))
    both = scaling(stacked, Reader(stacked.weight[0], statistics, stacked.format))
    assert error(both) <= error(jnp.ones(128))


def test_experts_with_scales_of_their_own(stacked, statistics):
    found = of_each_expert(smooth_scales, stacked)
    alone = smooth_scales(Reader(stacked.weight[0], statistics, stacked.format))
    np.testing.assert_allclose(found[0], alone, rtol=1e-5)
    np.testing.assert_array_equal(found[1], jnp.ones(128))


def test_candidates_that_overflow_lose():
    candidates = jnp.asarray([[1.0, 1.0], [2.0, 0.5], [4.0, 0.25]])
    found = best_scales(candidates, lambda s: jnp.where(s[0] > 3, jnp.nan, -s[0]))
    np.testing.assert_array_equal(found, [2, 0.5])


def test_copies_of_a_channel_share_a_scale_and_a_program(weight, statistics):
    fold = Fold("output", "qkv", 2, (2, 4, 16))
    reader = Reader(weight, statistics, WeightFormat.parse("uint4:g32"))
    found = awq_scales(reader, fold=fold)
    heads = np.asarray(found).reshape(2, 4, 16)
    np.testing.assert_array_equal(heads, np.broadcast_to(heads[:, :1], heads.shape))
    assert len(np.unique(found)) > 16
    programs = awq_scales._cache_size()  # type: ignore[attr-defined]
    again = Fold("output", "qkv", 2, (2, 4, 16))
    awq_scales(reader, fold=again)
    assert awq_scales._cache_size() == programs  # type: ignore[attr-defined]

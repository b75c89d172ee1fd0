from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.kernels import quantize
from mpjax.models import Linear
from mpjax.quantization import sensitivity
from mpjax.quantization.sensitivity import plain_places, sensitivities

TEXTS = ["the quick brown fox jumps over the lazy dog, and then it sleeps " * 6]


@pytest.fixture(scope="module")
def slopes(tiny):
    return sensitivities(tiny, TEXTS)


def test_each_map_has_a_slope(tiny, slopes):
    places = plain_places(tiny.model)
    assert len(slopes) == len(places) == 4 * tiny.config.num_layers
    assert min(slopes) > 0


def test_the_divergence_is_linear_in_the_squared_error(tiny, slopes, monkeypatch):
    monkeypatch.setattr(sensitivity, "NOISE", 0.05)
    sensitivity._noisy.clear_cache()
    finer = sensitivities(tiny, TEXTS)
    sensitivity._noisy.clear_cache()
    np.testing.assert_allclose(finer, slopes, rtol=0.3)


def test_a_rounded_map_costs_about_what_its_slope_says(tiny, slopes):
    place = plain_places(tiny.model)[-1]
    [part] = place.parts(tiny.model)
    kernel = part.kernel.get_value()
    rounded = quantize(kernel, "table3:g64").dequantize(kernel.dtype)
    error = float(((rounded - kernel) ** 2).sum() / (kernel**2).sum())
    ids = tiny.tokenizer.encode(TEXTS[0])
    text = jnp.asarray([ids[:128]])
    expected = sensitivity._logprobs(tiny.model, text)
    part.kernel.set_value(rounded)
    try:
        found = sensitivity._divergence(tiny.model, text, jnp.ones(text.shape, bool), expected)
    finally:
        part.kernel.set_value(kernel)
    assert float(found) / text.size == pytest.approx(slopes[-1] * error, rel=0.6)


def test_packed_models_are_refused(tiny_folder):
    lm = mpjax.load(tiny_folder, precision="W4A16KV8")
    with pytest.raises(ValueError, match="qkv is quantised already: load the 16-bit checkpoint"):
        sensitivities(lm, TEXTS)


def test_a_model_that_is_not_finite_is_named(tiny_folder):
    lm = mpjax.load(tiny_folder)
    place = plain_places(lm.model)[0]
    [kernel] = place.kernels(lm.model)
    place.assign(lm.model, [Linear(kernel * jnp.nan)])
    with pytest.raises(ValueError, match="the KL divergence is nan: look at the checkpoint"):
        sensitivities(lm, TEXTS)

"""Models with layers of two kinds of mixers: quantising with a text, and scales of a cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax import calibrate_cache
from mpjax.kernels import KVFormat, QuantizedTensor
from mpjax.models.registry import read_config
from mpjax.quantization.calibration import _largest
from mpjax.quantization.pipeline import quantize_decoder
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.text import Windows
from tests.models.sharded_families import VOCABULARY, build, keys

TOKENS = np.random.default_rng(2).integers(0, VOCABULARY, (8, 24)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return build("Qwen3_5ForCausalLM")


def is_packed(maps) -> bool:
    return any(isinstance(part.kernel.get_value(), QuantizedTensor) for part in maps.parts)


@pytest.mark.parametrize("named", [False, True])
def test_small_maps_stay_in_16_bits_unless_a_rule_names_them(model, named):
    rule = {"modules": "layers.*.attention.ba", "precision": "W8g32A16KV16"}
    content = {"precision": "W4g32A16KV16", "method": "rtn", "rules": [rule] if named else []}
    places = model.linear_places(model.config)
    recipe = Recipe.parse(content).of_model(places, model.config.num_layers)
    found = nnx.clone(model)
    quantize_decoder(found, lambda number: (model.layers[number], False), [], recipe)
    mixer = found.layers[0].attention
    assert (is_packed(mixer.qkvz), is_packed(mixer.ba)) == (True, named)


def test_gptq_reads_what_both_mixers_read(model):
    expected = jax.jit(lambda model, x: model(x))(model, TOKENS)
    errors = {}
    for method in ("rtn", "awq+gptq"):
        places = model.linear_places(model.config)
        recipe = Recipe.of("W4g32A16KV16", method).of_model(places, model.config.num_layers)
        found = nnx.clone(model)
        batches = [Windows(TOKENS, np.ones(TOKENS.shape, bool))]
        quantize_decoder(found, lambda number: (model.layers[number], False), batches, recipe)
        errors[method] = float(jnp.abs(found(TOKENS) - expected).mean())
    assert 0 < errors["awq+gptq"] < 0.95 * errors["rtn"]


def test_only_layers_with_keys_and_values_are_measured(model):
    largest, is_finite = _largest(model, jnp.asarray(TOKENS[:1]), jnp.int32(24))
    assert largest.shape == (2, 2, model.config.num_kv_heads, model.config.head_dim)
    assert bool(is_finite)
    assert bool((largest[0] == 1).all())  # a state, of which no scale is read
    assert len(np.unique(largest[1])) > 8


def test_keys_and_values_beside_a_state_are_measured(tiny):
    hf = keys("FalconH1ForCausalLM") | {"vocab_size": tiny.config.vocab_size}
    family, config = read_config(hf)
    model, kv_format = family(config, nnx.Rngs(0)), KVFormat.parse("KV8s")
    lm = dataclasses.replace(tiny, model=model, kv_format=kv_format)
    found = calibrate_cache(lm, ["import os"], window=8).model
    scales = np.asarray(found.cache_scales.get_value())
    assert scales.shape == (1, 2, config.num_kv_heads, config.head_dim)
    assert len(np.unique(scales)) > 8
    [(pages, _)] = found.create_cache(1, 16, kv_format).layers
    np.testing.assert_array_equal(pages.value_parameters, scales[0, 1])

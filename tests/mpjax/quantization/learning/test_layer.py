from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from mpjax.models import Linear
from mpjax.quantization.learning.descent import Learning
from mpjax.quantization.learning.layer import learn_layer
from mpjax.quantization.pipeline import Stream, quantize_decoder, quantize_layer
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.text import Windows
from tests.models.small import CONFIG, small_model

PATHS = CONFIG.layers[0].linear_paths(CONFIG)


@pytest.fixture
def batches(rng):
    tokens = rng.integers(0, CONFIG.vocab_size, (2, 4, 32)).astype(np.int32)
    is_real = np.ones((2, 4, 32), bool)
    is_real[1, 3, 5:] = False
    return [Windows(*pair) for pair in zip(tokens, is_real, strict=True)]


@pytest.fixture
def learn(batches):
    """Learns a layer in two bits, and gives its losses, its outputs' errors before and after."""
    model = small_model(CONFIG)
    stream, plain = Stream.of(model, batches), model.layers[0]
    rules = {path: Recipe.of("WNF2g32A16KV16", "rtn").rule_of(path) for path in PATHS}

    def error(layer):
        total = count = 0.0
        for states, is_real in zip(stream.states, stream.is_real, strict=True):
            expected, found = (
                np.asarray(it.inputs(states, stream.angles)[0], np.float64)[is_real]
                for it in (plain, layer)
            )
            total += (((found - expected) ** 2).sum(-1) / (expected**2).sum(-1)).sum()
            count += is_real.sum()
        return total / count

    def run(learning):
        layer = quantize_layer(plain, {}, rules, ())
        before = error(layer)
        losses = learn_layer(plain, layer, stream, PATHS, learning)
        assert all(type(it) is Linear for it in (layer.mlp.down, layer.attention.qkv.parts[0]))
        return losses, before, error(layer)

    return run


@pytest.mark.parametrize("learns_table", [True])
def test_the_loss_is_the_relative_error_of_outputs_and_falls(learn, learns_table):
    losses, before, after = learn(Learning(6, 0.02, learns_table))
    assert losses[0] == pytest.approx(before, rel=1e-4)
    assert min(losses) == pytest.approx(after, rel=1e-4)
    assert after < (0.75 if learns_table else 0.8) * before


def test_it_composes_with_other_steps(batches):
    """Behind a rounding, for maps whose rules say so."""
    model = small_model(CONFIG)
    expected = np.asarray(model(batches[0].tokens), np.float64)
    errors = {}
    for method in ("rtn", "rtn+learn"):
        quantized = nnx.clone(model)
        content = {"precision": "WNF2g32A16KV16", "method": "rtn", "learning": {"rate": 0.02}}
        content["rules"] = [{"modules": "layers.*.mlp.*", "method": method}]
        recipe = Recipe.parse(content)
        quantize_decoder(quantized, lambda n: (model.layers[n], False), batches, recipe)
        errors[method] = np.abs(quantized(batches[0].tokens) - expected).mean()
        kernels = [layer.attention.qkv.parts[0].kernel for layer in quantized.layers]
        if method == "rtn":
            plain = kernels
    assert errors["rtn+learn"] < 0.97 * errors["rtn"]
    for leaves in zip(*map(jax.tree.leaves, (plain, kernels)), strict=True):
        np.testing.assert_array_equal(*leaves)

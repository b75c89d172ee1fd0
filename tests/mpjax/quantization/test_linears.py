from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import QuantizedTensor
from mpjax.models import ExpertsSpec, LayerSpec, Linear, Mixtral
from mpjax.models.mlp import RoutedInputs
from mpjax.quantization.linears import quantize_map
from mpjax.quantization.pipeline import quantize_decoder
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.statistics import Statistics, squared_error
from mpjax.quantization.text import Windows
from tests.models.small import CONFIG
from tests.pallas_kernels.oracles import random_array

PATH = "mlp.experts.gate_up"


def rule_of(method: str) -> Any:
    return Recipe.of("W4g32A16KV16", method).rule_of(f"layers.0.{PATH}")


@pytest.fixture
def routed(rng):
    """Many correlated tokens to expert 0, some to expert 1, none to expert 2."""
    mixing = np.asarray(random_array(rng, (64, 64), "float32"))
    x = jnp.asarray(np.asarray(random_array(rng, (1, 200, 64), "float32")) @ mixing)
    experts = jnp.where(jnp.arange(200) < 170, 0, 1)[None, :, None]
    inputs = RoutedInputs(x, experts, 3)
    return Statistics.of_experts(inputs, jnp.ones((1, 200), bool), 4)


def kernel_of(linear: Linear) -> Any:
    return linear.kernel.get_value()


def test_experts_that_saw_few_tokens_fall_back_by_name(routed, rng):
    found = routed
    linear = Linear(random_array(rng, (3, 64, 32), "float32"), jnp.ones((3, 32)))
    with pytest.warns(UserWarning, match=r"gate_up: 2 of 3 experts .* for gptq: 1 \(30\), 2 \(0\)"):
        quantized = quantize_map(linear, PATH, rule_of("gptq"), found)
    nearest = quantize_map(linear, PATH, rule_of("rtn"), None)
    packed = kernel_of(quantized)
    assert isinstance(packed, QuantizedTensor)
    assert (packed.shape, quantized.bias.get_value().shape) == ((3, 64, 32), (3, 32))

    def error(linear: Linear, expert: int) -> float:
        one = jax.tree.map(lambda leaf: leaf[expert], kernel_of(linear)).dequantize()
        hessian = jax.tree.map(lambda leaf: leaf[expert], found).hessian
        return float(squared_error(one - kernel_of(plain)[expert], hessian).sum())

    plain = linear
    assert error(quantized, 0) < 0.7 * error(nearest, 0)
    assert error(quantized, 1) < error(nearest, 1)
    last = [jax.tree.map(lambda leaf: leaf[2], kernel_of(each)) for each in (quantized, nearest)]
    np.testing.assert_array_equal(last[0].words, last[1].words)


def test_a_map_with_too_little_text(rng):
    linear = Linear(random_array(rng, (64, 32), "float32"))
    x = random_array(rng, (1, 30, 64), "float32")
    found = Statistics.of(x, jnp.ones((1, 30), bool), 4)
    with pytest.warns(UserWarning, match="has 64 input channels, and the text has 30 tokens"):
        assert isinstance(
            kernel_of(quantize_map(linear, PATH, rule_of("gptq"), found)), QuantizedTensor
        )


def test_weights_beyond_the_range_name_the_expert():
    weights = jnp.ones((3, 64, 32)).at[1].set(1e9)
    with pytest.raises(ValueError, match=r"gate_up, expert 1: the largest magnitude of the weig"):
        quantize_map(Linear(weights), PATH, rule_of("rtn"), None)


def test_a_mixture_is_quantised_with_a_text(rng):
    spec = ExpertsSpec(64, num_experts=4)
    layers = tuple(LayerSpec(layer.attention, spec) for layer in CONFIG.layers[:1])
    model = Mixtral(dataclasses.replace(CONFIG, layers=layers), nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x * 8 if x.ndim > 2 else x, nnx.state(model)))
    norm = model.layers[0].mlp_norm.weight
    norm.set_value(norm.get_value().at[jnp.asarray([3, 40])].set(20.0))
    tokens = rng.integers(0, CONFIG.vocab_size, (16, 32)).astype(np.int32)
    plain, errors = model(tokens), {}
    for method in ("rtn", "awq+gptq"):
        copy = nnx.clone(model)
        recipe = Recipe.of("W4g32A16KV16", method)
        batches = [Windows(tokens, np.ones((16, 32), bool))]
        quantize_decoder(copy, lambda number, c=copy: (c.layers[number], False), batches, recipe)
        kernels = [k for place in copy.linear_places(copy.config) for k in place.kernels(copy)]
        assert all(isinstance(kernel, QuantizedTensor) for kernel in kernels)
        errors[method] = float(jnp.abs(copy(tokens) - plain).mean())
    assert 0 < errors["awq+gptq"] < 0.9 * errors["rtn"]
